"""What runtimes make of a folder that has a params.json and no config.json."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.doctor.misreadings import Case
from posenc.frequencies import float64_formulas
from posenc.runtimes.files.source import load
from posenc.runtimes.known import RUNTIMES
from tests.doctor.judging import run

SIZES = {
    "dim": 256,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 64,
    "norm_eps": 1e-5,
}
YARN = {"original_max_position_embeddings": 1024, "factor": 16, "beta": 32, "alpha": 1}
META = {**SIZES, "rope_theta": 500000.0, "use_scaled_rope": True}
MISTRAL = {
    **SIZES,
    "head_dim": 64,
    "hidden_dim": 512,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 16384,
}
DEEPSEEK = {**SIZES, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "kv_lora_rank": 64}


def judged(tmp_path, raw):
    path = tmp_path / "params.json"
    path.write_text(json.dumps(raw))
    return Case(load(path))


@pytest.mark.parametrize("raw", [META, DEEPSEEK], ids=["meta", "deepseek"])
def test_no_runtime_opens_a_checkpoint_of_meta_or_deepseek(tmp_path, raw):
    case = judged(tmp_path, raw)
    assert {name: c.known for name, c in case.computed.items()} == dict.fromkeys(
        RUNTIMES, "no such file"
    )
    said, code = run(Options((tmp_path,), ask=["none"]))
    assert code == 0 and "as meant" not in said and "No named runtime opens params.json" in said
    answers = json.loads(run(Options((tmp_path,), ask=["none"], as_json=True))[0])["runtimes"]
    assert {a["answer"] for a in answers.values()} == {"opens no such file"}


@pytest.mark.parametrize(
    "scale, multiplier", [(False, 1.0), (True, float64_formulas.yarn_attention_factor(16))]
)
def test_vllm_and_llama_cpp_open_mistrals_and_apply_its_scale_or_not(tmp_path, scale, multiplier):
    """vLLM: apply_scale false is attention_factor 1; the converter: yarn_log_multiplier 1, which
    divides the temperature by itself."""
    case = judged(tmp_path, {**MISTRAL, "yarn": {**YARN, "apply_scale": scale}})
    for name, computed in case.computed.items():
        if name in ("vllm", "llama.cpp"):
            (layer,) = computed.rotations.values()
            assert layer.multiplier == pytest.approx(multiplier)
            expected = float64_formulas.yarn_frequencies(64, 1e6, 16, 1024)
            assert layer.inv_freq == pytest.approx(expected)
        else:
            assert computed.known == ("unknown" if name == "sglang" else "no such file")
    assert run(Options((tmp_path,), ask=["none"]))[1] == 0


def test_llama_cpps_converter_stops_at_half_a_yarn(tmp_path):
    half = {key: value for key, value in YARN.items() if key != "factor"}
    computed = judged(tmp_path, {**MISTRAL, "yarn": half}).computed["llama.cpp"]
    assert computed.error == "KeyError: 'factor'"


def test_a_plain_checkpoint_of_mistral(tmp_path):
    case = judged(tmp_path, MISTRAL)
    assert case.judged_runtimes == ("vllm", "llama.cpp")
    assert not any(case.differences.values())


def test_a_version_that_is_not_recorded_stays_unknown(tmp_path):
    judged(tmp_path, MISTRAL)
    said, code = run(Options((tmp_path,), for_="vllm==0.1"))
    assert code == 3 and "no record of vllm 0.1" in said
