"""First screens for people who serve a model: what to do, in the file or the command at hand."""

import json
import shlex

import pytest

from posenc.doctor.command import Options
from posenc.doctor.rule import COMMAND_INDENT
from posenc.doctor.rules.longer_texts import CARDS
from posenc.files.sealed_json import strict_json
from posenc.frequencies import float64_formulas
from posenc.runtimes.known import emulate
from posenc.runtimes.writers.overrides import config_after_override, intended_config
from tests.doctor.judging import judge, run
from tests.doctor.threads import BASE

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 5120,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
SIMPLE = {**BASE, "rope_theta": 10000.0}


def screen(tmp_path, config, **options):
    path = tmp_path / "config.json"
    path.write_text(strict_json(config))
    return run(Options((path,), **options))


def too_long(config, length=65536):
    return [f for f in judge(config, length=length) if f.code == "PD064"]


def options_by_runtime(cure):
    """The lines of a cure that are to be copied, by the runtime that they are for."""
    lines = {}
    for line in cure.split("\n"):
        if line.startswith(COMMAND_INDENT):
            name, _, options = line.strip().partition(": ")
            lines[name] = options
    return lines


def test_a_text_that_loops_gets_the_scaling_of_the_card_and_a_line_for_each_server(tmp_path):
    (hit,) = too_long(QWEN3)
    assert hit.severity == "E" and "meant for 40960" in hit.message
    assert "the scaling of Qwen3's card" in hit.cure and "posenc extend MODEL --to" in hit.cure
    lines = options_by_runtime(hit.cure)
    assert set(lines) == {"vllm", "sglang", "llama.cpp"}
    assert lines["llama.cpp"] == (
        "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 32768 -c 131072"
    )
    wanted = float64_formulas.yarn_frequencies(128, 1e6, 4.0, 32768)
    for server in ("vllm", "sglang"):
        given = json.loads(shlex.split(lines[server])[1])
        served = config_after_override(QWEN3, given, server)
        computed = emulate(served, 131072, [server])[server]
        assert computed.error is None and computed.rotations["all"].inv_freq == pytest.approx(
            wanted
        )
        assert not too_long(intended_config(QWEN3, given))
    said, code = screen(tmp_path, QWEN3, length=65536)
    assert code == 1 and "PD039" not in said and "would allow it" not in said
    assert any(
        line.startswith(COMMAND_INDENT) and "--hf-overrides" in line for line in said.split("\n")
    )
    assert "--fix --out NEW" not in said.split("\n")[-1]


@pytest.mark.parametrize("inside", ["", "text_config"])
def test_the_scaling_of_a_hybrid_keeps_what_its_rope_dict_has(inside):
    config = QWEN3_5
    if inside:
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "text_config": QWEN3_5,
        }
    (hit,) = too_long(config, 500_000)
    lines = options_by_runtime(hit.cure)
    assert set(lines) == {"vllm", "sglang", "llama.cpp"}
    assert lines["llama.cpp"].endswith("--yarn-orig-ctx 262144 -c 1048576")
    wanted = float64_formulas.yarn_frequencies(64, 1e7, 4.0, 262144)  # a quarter of 256 channels
    for server in ("vllm", "sglang"):
        given = json.loads(shlex.split(lines[server])[1])
        rope = (given[inside] if inside else given)["rope_parameters"]
        assert rope["mrope_section"] == [11, 11, 10] and rope["mrope_interleaved"] is True
        served = config_after_override(config, given, server)
        computed = emulate(served, 1_000_000, [server])[server]
        assert computed.error is None and computed.max_length == 1048576
        assert computed.rotations["all"].inv_freq == pytest.approx(wanted)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_every_card_reaches_its_length_and_no_further(card):
    config = {**QWEN3, "max_position_embeddings": card.trained_length}
    for name in card.families:
        family = {**config, "model_type": name}
        del family["architectures"]
        reach = int(card.trained_length * card.factor)
        (hit,) = too_long(family, reach)
        assert f"{card.name}'s card" in hit.cure
        (hit,) = too_long(family, reach + 1)
        assert "knows no card" in hit.cure


def test_a_model_without_a_card_gets_a_try_that_says_so():
    (hit,) = too_long(SIMPLE, 2 * SIMPLE["max_position_embeddings"])
    assert "posenc knows no card" in hit.cure and '"factor": 2.0' in hit.cure


def test_no_scaling_is_proposed_where_the_file_has_one_or_kinds_of_layers():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (hit,) = too_long({**QWEN3, "max_position_embeddings": 131072, "rope_scaling": yarn}, 200000)
    assert "meant for 131072" in hit.message and "yarn-orig" not in hit.cure
    dynamic = {**SIMPLE, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    assert not too_long(dynamic, 10 * SIMPLE["max_position_embeddings"])


def test_a_length_that_fits_is_no_finding_and_a_sound_file_names_the_option(tmp_path):
    assert not too_long(QWEN3, 40960) and not too_long(QWEN3, None)
    said, code = screen(tmp_path, QWEN3, ask=["none"])
    assert code == 0 and "`--length N` judges a longer text" in said


def test_the_cure_of_a_refusal_names_the_missing_keys_and_their_place():
    whole = {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {
            **{k: v for k, v in QWEN3.items() if k not in ("architectures", "tie_word_embeddings")},
            "model_type": "qwen3_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]},
        },
    }
    (hit,) = [f for f in judge(whole, ("mlx-lm",)) if f.code == "PD039"]
    assert hit.cure.startswith('Write "tie_word_embeddings" into text_config, which mlx-lm')
    flat = {key: value for key, value in QWEN3.items() if key != "rms_norm_eps"}
    (hit,) = [f for f in judge(flat, ("mlx-lm",)) if f.code == "PD039"]
    assert hit.cure.startswith('Write "rms_norm_eps" at the top level, which mlx-lm')


GLM = {
    **BASE,
    "model_type": "glm4",
    "architectures": ["Glm4ForCausalLM"],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}


def test_a_scaling_that_a_runtime_leaves_out_is_named():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (hit,) = [f for f in judge({**GLM, "rope_scaling": yarn}, ("mlx-lm",)) if f.code == "PD038"]
    assert hit.message == (
        "mlx-lm leaves out the scaling, yarn with factor 4, and computes plain RoPE"
    )
    assert hit.cure.startswith("mlx-lm's glm4.py:") and "use another runtime" in hit.cure


def test_another_difference_than_a_scaling_names_the_keys_of_this_file():
    config = {**GLM, "model_type": "glm", "architectures": ["GlmForCausalLM"]}
    (hit,) = [f for f in judge(config, ("mlx-lm",)) if f.code == "PD038"]
    assert "leaves out" not in hit.message and "this file was read as" in hit.message
    assert "change head_dim and partial_rotary_factor, by which this file was read" in hit.cure


def test_the_scaling_of_a_card_is_written_for_the_key_of_this_file():
    (hit,) = too_long(QWEN3_5, 500_000)
    assert 'write "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000000' in hit.cure
    (hit,) = too_long(QWEN3)
    assert 'write "rope_scaling": {"rope_type": "yarn", "factor": 4.0' in hit.cure


def test_who_is_not_known_and_who_could_be_asked(tmp_path):
    said, _ = screen(tmp_path, QWEN3_5, ask=["none"])
    assert "not judged: mlx-lm. `--ask PYTHON` asks the one that is installed there." in said


def test_an_unclear_meaning_points_to_the_findings(tmp_path):
    said, code = screen(tmp_path, {**SIMPLE, "rope_scaling": {"rope_type": None, "factor": 2.0}})
    assert code == 1 and "What the file means" not in said  # linear is guessed, and said
    said, code = screen(tmp_path, {**SIMPLE, "rope_scaling": {"rope_type": None, "factor": None}})
    assert code == 1 and "What the file means is unclear: see the findings." in said


def test_an_older_server_is_judged_by_the_transformers_beside_it(tmp_path):
    said, code = screen(tmp_path, SIMPLE, for_="vllm==0.10")
    assert code == 3 and "no record of vllm 0.10" in said
    assert "`--for transformers==4.57`" in said
