"""Command-line overrides: recorded results of servers against those that we state."""

import json

import pytest

from posenc.runtimes.known import RUNTIMES
from posenc.runtimes.meaning import meaning_of
from posenc.runtimes.writers.overrides import (
    config_after_override,
    intended_config,
    override_options,
)
from tests.doctor.threads import BASE, GLM4
from tests.runtimes.golden_cases import FOLDER, config

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
    assert got.rotations["all"].inv_freq == pytest.approx(wanted["inv_freq"], rel=1e-6)
    assert got.rotations["all"].multiplier == pytest.approx(wanted["multiplier"], rel=1e-6)


@pytest.mark.parametrize(
    "case, base, given",
    [
        ("O1_rope_parameters_without_theta_on_theta500k", "02_", {"rope_parameters": YARN}),
        ("O2_rope_scaling_without_theta_on_theta500k", "02_", {"rope_scaling": YARN}),
        ("O3_rope_scaling_on_v5_config", "04_", {"rope_scaling": YARN}),
        ("O4_rope_theta_top_level_on_v5_config", "04_", {"rope_theta": 10000.0}),
        ("O9_qwen2_rope_parameters_without_theta", "44_", {"rope_parameters": YARN}),
        (
            "O10_qwen2_rope_parameters_with_theta_and_max",
            "44_",
            {
                "rope_parameters": {**YARN, "rope_theta": 1000000.0},
                "max_position_embeddings": 4096,
            },
        ),
    ],
)
def test_vllm_replaces_the_dict(case, base, given):
    got = RUNTIMES["vllm"](config_after_override(config(base), given, "vllm"), None)
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
    got = RUNTIMES["sglang"](
        config_after_override(config(base), recorded["overrides"], "sglang"), None
    )
    assert_same(got, recorded)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("number", ["12", "13", "15", "21", "24", "30", "34", "44", "79", "09"])
def test_a_printed_override_gives_what_is_meant(runtime, number):
    raw = config(f"{number}_")
    meaning = meaning_of(raw)
    given = json.loads(override_options(raw, meaning, runtime).split("'")[1])
    got = RUNTIMES[runtime](config_after_override(raw, given, runtime), None)
    for kind, layer in meaning.computed.rotations.items():
        assert got.rotations[kind].inv_freq == pytest.approx(layer.inv_freq, rel=1e-6, abs=1e-25)
        assert got.rotations[kind].multiplier == pytest.approx(layer.multiplier, rel=1e-6)
    assert got.max_length >= meaning.max_length


def test_an_override_that_does_not_exist_is_refused():
    raw = config("49_")
    with pytest.raises(ValueError, match="no options make sglang compute"):
        override_options(raw, meaning_of(raw), "sglang")
    with pytest.raises(ValueError, match="takes no overrides"):
        override_options(raw, meaning_of(raw), "llama.cpp")


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("family", ["gpt_oss", "llama", "deepseek_v3"])
def test_a_missing_number_ends_in_one_sentence(family, runtime, key, tmp_path, call):
    raw = {**BASE, "model_type": family, "rope_theta": 1e6, "rope_scaling": {**YARN, key: None}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    code, _, told = call("doctor", path, "--overrides", runtime)
    assert (code, told) == (0, "") or (code == 2 and told.count("\n") == 1), told


GEMMA = {
    **BASE,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "query_pre_attn_scalar": 16,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
DYNAMIC = {**BASE, "rope_theta": 1e6, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("name", ["gemma", "dynamic", "07", "39", "41", "44", "49", "81"])
def test_a_printed_override_given_back_is_no_error(name, runtime, tmp_path, call):
    raw = {"gemma": GEMMA, "dynamic": DYNAMIC}.get(name) or config(f"{name}_")
    path, length = tmp_path / "config.json", ("--length", 8192) if name == "dynamic" else ()
    path.write_text(json.dumps(raw))
    code, out, told = call("doctor", path, "--overrides", runtime, *length)
    if code == 2 and runtime == "sglang":  # it has no overrides for several kinds of layers
        assert "no options make sglang compute what the file means" in told
        return
    if (name, runtime) == ("39", "vllm"):  # two types: it stops before it looks at overrides
        assert "vllm refuses the file with any options: ValueError: Found conflicts" in told
        return
    given = out.split("'")[1]
    answer = json.loads(call("doctor", path, "--with", given, "--for", runtime, "--json")[1])
    assert not [rule for rule in answer["rules"] if rule["severity"] == "E"]
    if name in ("gemma", "49", "81"):
        fewer = {"rope_parameters": {"full_attention": {"rope_type": "default"}}}
        line = ("--with", json.dumps(fewer), "--for", "vllm")
        assert "has no rope_theta" in call("doctor", path, *line)[1]


def test_what_an_override_of_vllm_leaves_out_is_an_error(tmp_path, call):
    path = tmp_path / "config.json"
    half = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    path.write_text(json.dumps({**BASE, **GLM4, "rope_parameters": half}))
    given = json.dumps({"rope_parameters": {**YARN, "rope_theta": 1e6}})
    code, out, _ = call("doctor", path, "--with", given, "--for", "vllm")
    assert code == 1 and "PD038" in out


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_a_rope_dict_that_is_a_text_is_refused(name):
    with pytest.raises(ValueError, match=f"^--with: {name} must be an object or null, got 'yarn'"):
        intended_config(BASE, {name: "yarn"})
    with pytest.raises(ValueError, match=f"{name} must be an object or null, got 'yarn'"):
        meaning_of({**BASE, name: "yarn"})


def test_a_language_model_that_is_a_text_is_refused():
    outer = {"model_type": "gemma3", "text_config": {**BASE, "model_type": "gemma3_text"}}
    with pytest.raises(ValueError, match=r"^--with: text_config must be an object, got 'yarn'"):
        intended_config(outer, {"text_config": "yarn"})
