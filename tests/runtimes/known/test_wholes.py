"""Multimodal models in servers and mlx-lm: what these do with the config of the language model.

The numbers were printed by vLLM 0.33.0 itself, which was asked for the rotary modules that it
builds from these configs.
"""

import json

import pytest

from posenc.doctor.command import Options
from posenc.files.sealed_json import strict_json
from posenc.frequencies import float64_formulas
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import meaning_of
from posenc.runtimes.writers.overrides import config_after_override
from tests.doctor.judging import judge, run

TEXT = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1000,
    "rope_theta": 1000000.0,
}
SECTIONS = {"mrope_section": [16, 24, 24]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
VLLM_READ = {24: 0.005623412963895892, 30: 0.0015399264646329231, 40: 9.937442909714631e-05}
"""Pair -> radians per position, of Qwen2.5-VL with YARN."""
WHOLES = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", {}),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", {}),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", {"mrope_interleaved": True}),
    "glm4v": ("Glm4vForConditionalGeneration", "glm4v_text", {}),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", {}),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", None),
    "mistral3": ("Mistral3ForConditionalGeneration", "mistral", None),
    "internvl": ("InternVLForConditionalGeneration", "qwen2", None),
    "llava": ("LlavaForConditionalGeneration", "llama", None),
}


def whole(name, scaling=None, **text):
    architecture, inner, sections = WHOLES[name]
    rope = None
    if sections is not None:
        count = [8, 12, 12] if inner.startswith("glm4v_moe") else SECTIONS["mrope_section"]
        rope = {"rope_type": "default", "mrope_section": count, **sections, **(scaling or {})}
    settings = {} if rope is None else {"rope_scaling": rope}
    own = {"model_type": inner, **TEXT, **settings, **text}
    return {"model_type": name, "architectures": [architecture], "text_config": own}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("name", WHOLES)
def test_a_server_computes_what_the_file_of_a_multimodal_model_means(name, server):
    config = whole(name)
    computed = emulate(config, runtimes=[server])[server]
    meant = meaning_of(config).computed
    assert computed.is_known and computed.error is None
    for kind, layer in meant.rotations.items():
        for other in computed.rotations_of_kind(kind):
            assert other.inv_freq == pytest.approx(layer.inv_freq)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_vllms_mrope_takes_four_times_the_original_length_for_yarn(name):
    layer = emulate(whole(name, YARN), runtimes=["vllm"])["vllm"].rotations["all"]
    for pair, frequency in VLLM_READ.items():
        assert layer.inv_freq[pair] == pytest.approx(frequency, rel=1e-6)
    sglang = emulate(whole(name, YARN), runtimes=["sglang"])["sglang"].rotations["all"]
    assert sglang.inv_freq == pytest.approx(float64_formulas.yarn_frequencies(128, 1e6, 4.0, 32768))


def test_qwen3_vl_asks_vllm_for_a_table_as_long_as_the_text():
    layer = emulate(whole("qwen3_vl", YARN), runtimes=["vllm"])["vllm"].rotations["all"]
    assert layer.inv_freq == pytest.approx(float64_formulas.yarn_frequencies(128, 1e6, 4.0, 32768))


def test_vllms_overrides_divide_the_original_length_and_a_rule_says_so(tmp_path):
    config = whole("qwen2_5_vl", YARN)
    (hit,) = [f for f in judge(config) if f.code == "PD063"]
    assert hit.severity == "E" and hit.runtimes == ("vllm",) and "--overrides vllm" in hit.cure
    assert "PD063" not in {f.code for f in judge(whole("qwen3_vl", YARN))}
    path = tmp_path / "config.json"
    path.write_text(strict_json(config))
    said, code = run(Options((path,), overrides="vllm"))
    given = json.loads(said.split("'")[1])
    rope = given["text_config"]["rope_parameters"]
    assert code == 0 and rope["original_max_position_embeddings"] == 8192
    served = config_after_override(config, given, "vllm")
    computed = emulate(served, runtimes=["vllm"])["vllm"].rotations["all"]
    assert computed.inv_freq == pytest.approx(meaning_of(config).computed.rotations["all"].inv_freq)


def test_mlx_lm_hands_on_nothing_but_the_language_models_own_config():
    config = whole("qwen3_vl")
    beside = emulate({**config, "tie_word_embeddings": False}, runtimes=["mlx-lm"])["mlx-lm"]
    assert "missing 1 required positional argument: 'tie_word_embeddings'" in beside.error
    inside = whole("qwen3_vl", tie_word_embeddings=False)
    assert emulate(inside, runtimes=["mlx-lm"])["mlx-lm"].error is None
    assert emulate(whole("mistral3"), runtimes=["mlx-lm"])["mlx-lm"].error is None


def test_internvl_of_the_hub_keeps_its_language_model_in_llm_config():
    """No class of transformers has it: its own code is loaded, which posenc does not run. vLLM and
    SGLang have its model, which takes the language model's own."""
    inner = {"model_type": "qwen2", **TEXT, "rope_scaling": YARN}
    hub = {"model_type": "internvl_chat", "architectures": ["InternVLChatModel"]}
    computed = emulate({**hub, "llm_config": inner})
    alone = emulate({**inner, "architectures": ["Qwen2ForCausalLM"]})
    for server in ("vllm", "sglang"):
        assert computed[server].rotations["all"] == alone[server].rotations["all"]
        assert computed[server].max_length == alone[server].max_length
    for runtime in ("transformers-4", "transformers-5", "mlx-lm"):
        assert computed[runtime].known == "no model"
    assert computed["llama.cpp"].known == "unknown"
    assert emulate({**hub, "text_config": inner})["vllm"].known == "unknown"  # of other forms
    plain = {"llm_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}}
    after = config_after_override({**hub, "llm_config": inner}, plain, "vllm")
    assert emulate(after)["vllm"].rotations[
        "all"
    ].inv_freq == float64_formulas.unscaled_frequencies(128, 5000.0)
