"""Mistakes in the settings of families with kinds of layers or a rotated part of each head."""

import copy

import pytest

from posenc.runtimes.config_model import BadConfigError
from posenc.runtimes.conformance import vectors
from tests.doctor.judging import judge

CONFIGS = {vector["name"]: vector["config"] for vector in vectors()}
V4 = CONFIGS["deepseek-v4"]


def found(name, changes):
    config = {**copy.deepcopy(CONFIGS[name]), **changes}
    return {f"{f.severity} {f.code}" for f in judge(config)}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mimo-v2-flash", {"rope_theta": 1000000}, "E PD043"),
        ("mimo-v2-flash", {"swa_rope_theta": 500000}, "E PD043"),
        ("minimax-m2", {"rotary_dim": 256}, "E PD046"),
        ("minimax-m2", {"rotary_dim": 63}, "E PD046"),
        ("deepseek-v3", {"rope_interleave": False}, "W PD055"),
        ("llama-3-8b", {"rope_theta": None}, "E PD004"),
        (
            "qwen3-0.6b",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "E PD026",
        ),
    ],
)
def test_a_mistake_is_seen(name, changes, said):
    assert said not in found(name, {})
    assert said in found(name, changes)


def test_released_bases_that_the_class_has_anyway_are_no_mistake():
    released = {"rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334}
    assert "E PD043" not in found("mimo-v2-flash", released)


def test_a_flat_dict_that_deepseek_v4_reads_is_no_mistake():
    flat = {"rope_scaling": None, "rope_parameters": V4["rope_scaling"]}
    assert "E PD026" not in found("deepseek-v4", flat)


def test_a_code_of_layers_that_no_class_knows_is_bad_input():
    with pytest.raises(BadConfigError, match="compress_ratios has 8, expected 0, 4, 128"):
        found("deepseek-v4", {"compress_ratios": [0, 4, 8, 128, 4, 0]})


def test_a_refusal_of_an_old_name_is_an_error():
    """transformers 5 wants the original length inside of a dict of the type su."""
    config = copy.deepcopy(CONFIGS["phi-4-mini"])
    config["rope_scaling"]["type"] = "su"
    errors = {(f.code, *f.runtimes) for f in judge(config) if f.severity == "E"}
    assert ("PD039", "transformers-5") in errors
