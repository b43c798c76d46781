"""Released spellings that transformers accepts are read as its classes read them."""

import pytest

from posenc.runtimes.files.spelling import as_transformers
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import meaning_of
from tests.runtimes.known.test_vendors import CONFIGS

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
TEXT = {**SIZES, "max_position_embeddings": 8192}


def computed(raw, runtime="transformers-5"):
    return emulate(as_transformers(raw), None, [runtime])[runtime]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_the_type_mrope_is_no_other_type_for_qwens_vision_models(family):
    raw = {"model_type": family, **TEXT, "rope_theta": 1e6, "vision_config": {}}
    raw["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 3]}
    for runtime in ("transformers-4", "transformers-5"):
        got = computed(raw, runtime)
        assert got.error is None and got.rotations["all"].inv_freq[1] == 1e6 ** (-2 / 16)
    other = {**TEXT, "model_type": "qwen2", "rope_scaling": raw["rope_scaling"]}
    assert computed(other).error == "KeyError: 'mrope'"


def test_a_base_next_to_a_text_config_is_not_read():
    text = {"model_type": "qwen2_vl_text", **TEXT, "rope_theta": 5000.0}
    for inner, base in ((text, 5000.0), ({**text, "rope_theta": None}, 1e6)):
        inner = {k: v for k, v in inner.items() if v is not None}
        raw = {"model_type": "qwen2_vl", "rope_theta": 123.0, "text_config": inner}
        assert computed(raw).rotations["all"].inv_freq[1] == base ** (-2 / 16)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "granitemoehybrid", **TEXT, "position_embedding_type": "nope"},
        {"model_type": "falcon", **SIZES, "alibi": True},
    ],
)
def test_a_model_that_rotates_nothing_means_nothing_else(raw):
    meant = meaning_of(as_transformers(raw)).computed
    assert meant.rotations == {} == computed(raw).rotations
    assert meant.without_rotation == computed(raw).without_rotation == (0, 1)


def test_step_has_a_base_for_each_layer():
    raw = {
        "model_type": "step3p5",
        **TEXT,
        "head_dim": 16,
        "rope_theta": [5e6, 1e4],
        "partial_rotary_factors": [0.5, 1.0],
        "layer_types": ["full_attention", "sliding_attention"],
    }
    layers = computed(raw).rotations
    assert [len(layers[k].inv_freq) for k in layers] == [4, 8]
    assert layers["full_attention"].inv_freq[1] == 5e6 ** (-2 / 8)
    with pytest.raises(ValueError, match="rope_theta must be a finite number"):
        as_transformers({**raw, "model_type": "llama"})


def test_equal_bounds_of_llama_4_are_converted():
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 1.0, "factor": 16.0}
    bounds |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    raw = {"model_type": "llama4_text", **TEXT, "head_dim": 16, "rope_scaling": bounds}
    assert computed(raw, "llama.cpp").error is None
    exaone = {**raw, "model_type": "exaone4", "rope_theta": 1e6}
    assert "low_freq_wavelen" in (computed(exaone, "llama.cpp").error or "")


def test_what_is_not_read_of_a_server_is_no_refusal():
    assert computed(CONFIGS["hunyuan-7b"], "vllm").known == "unknown"


@pytest.mark.parametrize("runtime", ["transformers-5", "vllm", "sglang"])
def test_a_length_with_a_point_is_refused_by_the_class_that_reads_it(runtime):
    """As transformers 5.23, vLLM 0.33 and SGLang 0.5.23 did, asked."""
    raw = {"model_type": "llama", **TEXT}
    assert emulate(raw, None, [runtime])[runtime].error is None
    got = emulate({**raw, "max_position_embeddings": 8192.0}, None, [runtime])[runtime]
    assert got.error is not None and "max_position_embeddings" in got.error
