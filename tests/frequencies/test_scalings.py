"""What the classes of scalings say of themselves holds wherever posenc reads it."""

from dataclasses import fields

import pytest

import posenc
from posenc.encodings import entry
from posenc.extend.methods import METHODS
from posenc.frequencies.scalings import registry
from posenc.frequencies.scalings.lookup import ROPE_TYPES, SCALINGS
from posenc.frequencies.scalings.scaling import RopeType, Scaling, rope_frequencies
from posenc.hf.rope_settings import RopeSetting, rope_parameters
from posenc.runtimes.known.transformers5_rope_dicts import NEEDED_KEYS, STRETCHING_TYPES

NUMBERS = {"factor": 4.0, "original_max_positions": 512, "p": 0.5}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
WITH_A_TYPE = [scaling for scaling in SCALINGS.values() if scaling.rope_type is not None]


def example(scaling: type[Scaling]) -> Scaling:
    names = {field.name for field in fields(scaling)}  # pyright: ignore[reportArgumentType]
    return scaling(**{name: number for name, number in NUMBERS.items() if name in names})


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_has_a_source_and_is_found_by_its_name(name: str):
    scaling = SCALINGS[name]
    assert scaling.name == name
    assert scaling.source
    if scaling.encoding is not None:
        assert entry(scaling.encoding.name).defaults["scaling"] == name


def test_no_two_scalings_have_one_name():
    classes = [value for value in vars(registry).values() if isinstance(value, type)]
    assert [*SCALINGS.values()] == classes


@pytest.mark.parametrize("scaling", WITH_A_TYPE)
def test_a_config_that_was_written_is_read_as_the_same_scaling(scaling: type[Scaling]):
    written = example(scaling)
    keys = rope_parameters(RopeSetting(None, 1e4, 16, written, 512), 16, is_proportional=True)
    assert scaling.rope_type is not None
    assert keys["rope_type"] == scaling.rope_type.name
    longest = 2048 if scaling.rope_type.has_original_length else 512
    config = {"model_type": "llama", **SIZES, "max_position_embeddings": longest}
    read = posenc.RoPE.from_config({**config, "rope_parameters": keys}).scaling
    assert type(read) is scaling
    for length in (100, 2048):
        expected = rope_frequencies(16, 1e4, written, length)
        assert rope_frequencies(16, 1e4, read, length) == expected


@pytest.mark.parametrize("rope_type", [r for r in ROPE_TYPES.values() if r.name in NEEDED_KEYS])
def test_a_type_has_the_keys_that_transformers_needs(rope_type: RopeType):
    assert set(rope_type.required) == set(NEEDED_KEYS[rope_type.name])
    assert rope_type.has_original_length is (rope_type.name in STRETCHING_TYPES)


@pytest.mark.parametrize("scaling", [s for s in SCALINGS.values() if s.extend_method is not None])
def test_a_method_of_extend_is_exact_with_a_cache_unless_lengths_matter(scaling: type[Scaling]):
    assert scaling.extend_method is not None
    method = METHODS[scaling.extend_method.name]
    assert method.summary == scaling.extend_method.summary
    found = method.make_scaling(RopeSetting(None, 1e4, 16, None, 512), 4.0)
    assert found is not None and found == example(scaling)
    assert method.cache_safe is not found.depends_on_length


def test_a_rope_type_is_one_that_transformers_has():
    """Without one, a config says longrope, or nothing: no runtime would read another word."""
    assert ROPE_TYPES.keys() <= {"default", "proportional", *NEEDED_KEYS}


def test_three_scalings_by_four_have_the_numbers_of_the_lesson():
    """docs/learn/scaling.md: which pairs slow down, and where NTK's meet new angles."""
    shape = posenc.ModelShape(embed_dim=512, num_heads=8, train_length=2048)

    def frequencies_of(name):
        return posenc.create(name, shape).frequencies(8192)

    plain = frequencies_of("rope").inv_freq
    slowed = {
        name: [float(p / s) for p, s in zip(plain, frequencies_of(name).inv_freq, strict=True)]
        for name in ("linear", "ntk", "yarn")
    }
    assert slowed["linear"] == pytest.approx([4.0] * 32)
    assert slowed["ntk"][0] == 1 and slowed["ntk"][-1] == pytest.approx(4)
    assert slowed["yarn"][0] == 1 and slowed["yarn"][21:] == pytest.approx([4.0] * 11)
    new_from = [2048 * times for times in slowed["ntk"][21:]]
    assert round(new_from[0]) == 5238 and sum(token < 8191 for token in new_from) == 10
    factor = frequencies_of("yarn").attention_factor
    assert factor == pytest.approx(1.139, abs=5e-4) and factor**2 == pytest.approx(1.296, abs=1e-3)
    assert 10_000 * 4 ** (64 / 62) == pytest.approx(41_829, abs=0.5)
