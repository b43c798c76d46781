"""The grammar of encodings: what a text means, its canonical form, and where it is wrong."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posenc import ModelShape, create
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.registry import encoding_class, parse
from posenc.encodings.registry.grammar import Option, Part, Spec, SpecError
from posenc.encodings.scores.alibi import ALiBi

SHAPE = ModelShape(64, 4, train_length=32)

CANONICAL = {
    "rope": "rope",
    " rope : rope_theta = 5e5 ": "rope:rope_theta=500000",
    "yarn:factor=8.0,beta_fast=1": "yarn:beta_fast=1,factor=8",
    "rope + alibi:bias_max=4": "rope+alibi:bias_max=4",
    "rope/nope every 4": "rope/nope every 4",
    "rope / alibi / nope": "rope/alibi/nope",
    "package.module:Class": "package.module:Class",
    "package.module:Class:a=true,b=none": "package.module:Class:a=true,b=none",
    "module:Outer.Inner": "module:Outer.Inner",
    "./my.py:Mine": "./my.py:Mine",
    "my.py:Mine:slope=-0.5+rope": "my.py:Mine:slope=-0.5+rope",
    "'my files/my.py':Mine": '"my files/my.py":Mine',
    "rope / my.py:Mine every 2": "rope / my.py:Mine every 2",
    "my.py:Mine/nope": "my.py:Mine/nope",
    "C:\\here\\my.py:Mine": "C:\\here\\my.py:Mine",
    "a:B:names=[x, 'two words', 3.5, [1, 2]]": 'a:B:names=[x,"two words",3.5,[1,2]]',
    "a:B:word='true',number='1'": 'a:B:number="1",word="true"',
    "rope:rope_theta=1e+5+alibi": "rope:rope_theta=100000+alibi",
    "a:B:empty=[],text=''": 'a:B:empty=[],text=""',
}


@pytest.mark.parametrize("text", CANONICAL)
def test_canonical_text(text):
    assert str(parse(text)) == CANONICAL[text]
    assert str(parse(CANONICAL[text])) == CANONICAL[text]


WRONG = {
    "": (1, "expected an encoding"),
    "rope+": (6, "found nothing"),
    "rope alibi": (6, "found 'alibi'"),
    "rope:": (6, "a class or key=value"),
    "rope:rope_theta=": (17, "a value is missing"),
    "rope:rope_theta=1,": (19, "expected an option as key=value"),
    "yarn:factor=1,factor=2": (15, "factor is given twice"),
    "a:B:x=[1, 2": (7, "the list that begins here is not closed"),
    "a:B:x='1": (7, "the quote that begins here is not closed"),
    "a:B:x=[[[[[[[[[1]]]]]]]]]": (15, "nested too deeply"),
    "my.py": (6, "as in my.py:MyEncoding"),
    "package.module": (15, "as in package.module:MyEncoding"),
    "'my.txt':X": (1, "path of a .py file"),
    "rope/nope every": (16, "a whole number >= 2"),
    "rope/nope every 1": (16, "a whole number >= 2"),
    "rope every 4": (11, "for two layers"),
    "=rope": (1, "a label is missing"),
    "_a=rope": (1, "begins with a letter or a digit"),
    "$a$=rope": (1, "expected an encoding"),
    "roep": (1, "Unknown encoding 'roep'. Did you mean 'rope'"),
    "rope+albi": (6, "Unknown encoding 'albi'. Did you mean 'alibi'"),
    "yarn:factr=2": (6, "unknown option factr.*Did you mean 'factor'"),
    "rope:rope_theta=half": (6, "rope_theta must be a finite number, got 'half'"),
    "rope:scaling=yarn": (6, "scaling 'yarn' needs factor"),
    "yarn:truncate=False": (6, "truncate must be True or False, got 'False'"),
    "rope:RoPE": (6, "an option of rope is key=value; 'RoPE' has no value"),
    "posenc.encodings.scores.alibi:ALiB": (1, "no class 'ALiB'; did you mean 'ALiBi'"),
    "posenc.encodings.scores.alibi:Tensor": (
        1,
        "'Tensor' is a class and no posenc.PositionEncoding",
    ),
    "nowhere.at_all:X": (1, "there is no module 'nowhere'"),
    "rope+nowhere.py:X": (6, "there is no file nowhere.py"),
    "rnope+alibi": (1, "RNoPE differs per layer"),
    "rope/learned": (1, "embeddings are encoded once"),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_text_says_what_and_where(text):
    column, said = WRONG[text]
    with pytest.raises(ValueError, match=said) as raised:
        create(text, SHAPE)
    where = re.search(r"['\"], column (\d+): ", str(raised.value))
    assert (int(where[1]) if where else 1) == column, raised.value


_WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)
_OPTIONS = st.dictionaries(_WORDS, _VALUES, max_size=3).map(
    lambda given: tuple(Option(key, value) for key, value in sorted(given.items()))
)
_PARTS = st.one_of(
    st.builds(Part, _WORDS, st.just(""), _OPTIONS),
    st.builds(Part, st.just("a.b"), _WORDS, _OPTIONS),
    st.builds(Part, st.text(max_size=9).map(lambda text: f"{text}.py"), _WORDS, _OPTIONS),
)
_LAYERS = st.lists(_PARTS, min_size=1, max_size=2).map(tuple)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.lists(_LAYERS, min_size=1, max_size=3), st.integers(2, 9), st.booleans())
def test_every_spec_goes_to_text_and_back(layers, every, use):
    spec = Spec(tuple(layers), every if use and len(layers) == 2 else None)
    again = parse(str(spec))
    assert str(again) == str(spec)
    assert [part.target for part in again.parts] == [part.target for part in spec.parts]
    for part, other in zip(again.parts, spec.parts, strict=True):
        assert {o.key: o.value for o in part.options} == {o.key: o.value for o in other.options}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.text(alphabet="rope:+/=,.[]'\" everyx14\\\n", max_size=24))
def test_any_text_is_read_or_refused_at_a_character(text):
    try:
        parse(text)
    except SpecError as error:
        assert 1 <= error.column <= len(text) + 1


def test_a_text_builds_what_its_parts_say():
    both = create("rope:rope_theta=500000+alibi:bias_max=4", SHAPE)
    rope, alibi = both.members
    assert isinstance(rope, RoPE) and rope.rope_theta == 500000 and not rope.interleaved
    assert isinstance(alibi, ALiBi) and alibi.slopes == ALiBi(4, bias_max=4.0).slopes


def test_layers_take_turns():
    def places(text: str) -> list[tuple[int, ...]]:
        encoding = create(text, SHAPE)
        return [encoding.for_layer(i).claims.places for i in range(6)]

    assert places("rope/nope every 3") == [(2,), (2,), ()] * 2
    assert places("rope/rope+alibi/nope") == [(2,), (2, 3), ()] * 2


def test_options_override_the_texts_which_override_the_registrys():
    assert create("yarn", SHAPE).scaling.factor == 4
    assert create("yarn:factor=2", SHAPE).scaling.factor == 2
    assert create("yarn:factor=2", SHAPE, factor=3.0).scaling.factor == 3
    with pytest.raises(ValueError, match="names 2 encodings: give factor in the text"):
        create("yarn+alibi", SHAPE, factor=3.0)


def test_a_class_by_its_module_has_no_defaults_of_the_registry():
    assert encoding_class("posenc.encodings.queries_keys.rope:RoPE") is RoPE
    with pytest.raises(TypeError, match="interleaved"):
        create("posenc.encodings.queries_keys.rope:RoPE", SHAPE)
    assert create("posenc.encodings.queries_keys.rope:RoPE:interleaved=true", SHAPE).interleaved


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        (None, ModelShape(64, 4), r'name must be a text such as "rope".*got None'),
        (RoPE, ModelShape(64, 4), "must be a text.*got RoPE"),
        ("rope", {}, r"shape must be a posenc.ModelShape, such as.*got \{\}"),
        ("rope", 64, "shape must be a posenc.ModelShape.*got 64"),
        ("rope+alibi", None, "shape must be a posenc.ModelShape.*got None"),
        ("rope", ModelShape, "shape must be a posenc.ModelShape"),
    ],
)
def test_create_says_what_it_takes(name, shape, said):
    with pytest.raises(TypeError, match=f"^create: .*{said}"):
        create(name, shape)
