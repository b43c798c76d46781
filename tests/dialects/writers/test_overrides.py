"""Command-line overrides: recorded results of servers against those that we state."""

import json

import pytest

from posenc.dialects.meaning import meaning_of
from posenc.dialects.runtimes import RUNTIMES
from posenc.dialects.writers.overrides import overridden, override
from tests.dialects.golden_cases import FOLDER, config
from tests.doctor.threads import BASE

RECORDED = json.loads((FOLDER / "_overrides.json").read_text("utf-8"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def layer_of(recorded):
    return next(v for v in recorded["rotary"].values() if "inv_freq" in v)


def assert_same(got, recorded):
    if "error" in recorded:
        assert got.error
        return
    assert got.error is None
    wanted = layer_of(recorded)
    assert got.layers["all"].inv_freq == pytest.approx(wanted["inv_freq"], rel=1e-6)
    assert got.layers["all"].multiplier == pytest.approx(wanted["multiplier"], rel=1e-6)


@pytest.mark.parametrize(
    "case, base, given",
    [
        ("O1_rope_parameters_without_theta_on_theta500k", "02_", {"rope_parameters": YARN}),
        ("O2_rope_scaling_without_theta_on_theta500k", "02_", {"rope_scaling": YARN}),
        ("O3_rope_scaling_on_v5_config", "04_", {"rope_scaling": YARN}),
        ("O4_rope_theta_top_level_on_v5_config", "04_", {"rope_theta": 10000.0}),
        ("O9_qwen2_rope_parameters_without_theta", "44_", {"rope_parameters": YARN}),
        (
            "O10_qwen2_rope_parameters_with_theta_and_max", "44_",
            {
                "rope_parameters": {**YARN, "rope_theta": 1000000.0},
                "max_position_embeddings": 4096,
            },
        ),
    ],
)  # fmt: skip
def test_vllm_replaces_the_dict(case, base, given):
    got = RUNTIMES["vllm"](overridden(config(base), given, "vllm"), None)
    recorded = RECORDED["vllm"][case]
    assert_same(got, recorded)
    if "error" not in recorded:
        assert got.max_length == recorded["default_max_model_len"]


@pytest.mark.parametrize("case", sorted(RECORDED["sglang"]))
def test_sglang_merges_into_the_dict(case):
    recorded = RECORDED["sglang"][case]
    base = "04_" if "v5" in case else "02_"
    if recorded["resolved"]["rope_theta"] == 10000.0:
        base = "01_"
    got = RUNTIMES["sglang"](overridden(config(base), recorded["overrides"], "sglang"), None)
    assert_same(got, recorded)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("number", ["12", "13", "15", "21", "24", "30", "34", "44", "79", "09"])
def test_a_printed_override_gives_what_is_meant(runtime, number):
    raw = config(f"{number}_")
    meaning = meaning_of(raw)
    given = json.loads(override(raw, meaning, runtime).split("'")[1])
    got = RUNTIMES[runtime](overridden(raw, given, runtime), None)
    for kind, layer in meaning.computed.layers.items():
        assert got.layers[kind].inv_freq == pytest.approx(layer.inv_freq, rel=1e-6, abs=1e-25)
        assert got.layers[kind].multiplier == pytest.approx(layer.multiplier, rel=1e-6)
    assert got.max_length >= meaning.max_length


def test_an_override_that_does_not_exist_is_refused():
    raw = config("49_")
    with pytest.raises(ValueError, match="sglang cannot"):
        override(raw, meaning_of(raw), "sglang")
    with pytest.raises(ValueError, match="takes no overrides"):
        override(raw, meaning_of(raw), "llama.cpp")


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama", "deepseek_v3"])
def test_a_missing_number_ends_in_one_sentence(family, runtime, key, tmp_path, call):
    raw = {**BASE, "model_type": family, "rope_theta": 1e6, "rope_scaling": {**YARN, key: None}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    code, _, told = call("doctor", path, "--overrides", runtime)
    assert (code, told) == (0, "") or (code == 2 and told.count("\n") == 1), told
