"""Encodings of a study that are no hybrid, or another one's twin, in the study's model."""

import pytest

from posenc import compare
from posenc.compare.options import Options
from posenc.compare.plan.encodings import are_twins
from posenc.compare.plan.plan import check_plan, make_plan
from posenc.encodings import ModelShape, create

SHAPE = ModelShape(embed_dim=32, num_heads=4, train_length=16)


def checked(*encodings: str, layers: int) -> None:
    check_plan(make_plan(Options(list(encodings), layers=layers)), workers=1, local_workers=1)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("text", "layers", "enough"),
    [
        ("rnope", 3, 4),
        ("rnope_swa", 1, 4),
        ("irope", 2, 4),
        ("rnope:every=7", 6, 7),
        ("rope/nope every 4", 3, 4),
        ("alibi/nope every 9", 8, 9),
        ("rope/alibi/t5", 2, 3),
        ("rope/fire", 1, 2),
    ],
)
def test_a_hybrid_needs_as_many_layers_as_its_pattern(text, layers, enough):
    with pytest.raises(ValueError, match=rf"{layers}, so that a part.*--layers {enough} would do"):
        checked("alibi", text, layers=layers)
    checked("alibi", text, layers=enough)


def test_a_suite_of_three_layers_refuses_a_pattern_of_four():
    plan = make_plan(Options(["rope", "rnope"], suite=True))
    with pytest.raises(ValueError, match="rnope: RNoPE repeats after 4 layers"):
        check_plan(plan, workers=1, local_workers=1)


def test_nothing_is_written_for_a_hybrid_that_does_not_fit(tmp_path):
    with pytest.raises(ValueError, match="--layers 4"):
        compare.run(["rope", "rnope"], layers=3, out=tmp_path / "study")
    assert not (tmp_path / "study").exists()


TWINS = [
    ("rope", "posenc.encodings.queries_keys.rope:RoPE:interleaved=false"),
    ("rope", "rope:rope_theta=10000"),
    ("rope", "rope/rope every 4"),
    ("rope", "rope+nope"),
    ("t5", "t5/t5"),
    ("fire", "fire/fire/fire"),
    ("rope+alibi", "alibi+rope"),
    ("alibi+t5", "t5+alibi"),
    ("learned", "learned/nope"),
    ("rope/nope", "rope/nope every 2"),
    ("rnope", "rope/nope every 4"),
    ("rnope_swa", "rnope:windows=sliding"),
    ("yarn", "rope:scaling=yarn,factor=4"),
]
OTHERS = [
    ("rope", "rope:rope_theta=10001"),
    ("rope", "rope_interleaved"),
    ("rope", "rope/nope"),
    ("rope/nope", "nope/rope"),
    ("rope/nope every 3", "rope/nope every 4"),
    ("rnope", "rnope_swa"),
    ("rnope_swa", "rnope:windows=sliding,window_size=4"),
    ("rnope", "rnope:every=2"),
    ("alibi", "alibi+alibi"),
    ("learned", "sinusoidal"),
]


@pytest.mark.parametrize(("one", "other"), TWINS)
def test_the_same_encoding_spelt_differently_is_a_twin(one, other):
    assert are_twins(create(one, SHAPE), create(other, SHAPE), 4)


def test_twins_are_named_before_training():
    with pytest.raises(ValueError, match=r"'rope' and 'second' are the same encoding .* 4 layers"):
        checked("rope", "alibi", "second=rope/rope every 4", layers=4)


@pytest.mark.parametrize(("one", "other"), OTHERS)
def test_encodings_that_differ_are_no_twins(one, other):
    assert not are_twins(create(one, SHAPE), create(other, SHAPE), 12)


def test_long_lists_of_factors_are_compared_to_their_end():
    shape = ModelShape(embed_dim=256, num_heads=2)
    one, other = (create(f"longrope:long_factor={[2.5] * 63 + [end]}", shape) for end in (3, 4))
    assert not are_twins(one, other, 1)
