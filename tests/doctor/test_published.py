"""Shapes of published configs that were judged wrong: sections, towers, vendors' own rotations."""

import json

import pytest

from posenc.doctor.command import Options
from posenc.runtimes.files.source import NoRotationError, load
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import UnknownFamilyError, meaning_of
from tests.doctor.judging import codes, judge, run
from tests.doctor.test_several_parts import LLAMA, SIZES, YARN

MROPE = {"type": "mrope", "mrope_section": [2, 3, 3]}
QWEN = {**SIZES, "model_type": "qwen2_5_vl", "rope_scaling": MROPE}


def test_fix_keeps_the_sections_that_transformers_4_reads_in_each_layer(tmp_path):
    path, out = tmp_path / "config.json", tmp_path / "new"
    path.write_text(json.dumps(QWEN))
    run(Options((path,), fix=True, out=out))
    assert load(out).raw["rope_scaling"]["mrope_section"] == [2, 3, 3]


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        ("qwen2_vl", "qwen2_vl_text"),
        ("qwen2_5_vl", "qwen2_5_vl_text"),
        ("glm4v", "glm4v_text"),
        ("qwen2_5_omni_thinker", "qwen2_5_omni_text"),
    ],
)
def test_transformers_4_stops_without_sections(outer, inner):
    own = {**SIZES, "model_type": inner, "rope_scaling": {"rope_type": "default"}}
    got = emulate({"model_type": outer, "text_config": own})["transformers-4"]
    assert got.error == "KeyError: 'mrope_section'"
    own["rope_scaling"] = None
    got = emulate({"model_type": outer, "text_config": own})["transformers-4"]
    assert ("subscriptable" in (got.error or "")) is (outer != "qwen2_5_omni_thinker")


def test_keys_of_a_flat_config_that_do_not_reach_the_language_model_are_not_read():
    yarn = {**YARN, "mrope_section": [2, 3, 3]}
    own = {"head_dim": 8, "original_max_position_embeddings": 512, "partial_rotary_factor": 0.5}
    flat = {**QWEN, "rope_scaling": yarn}
    assert meaning_of({**flat, **own}).computed == meaning_of(flat).computed


def test_the_base_of_a_vision_tower_is_not_asked_for_at_the_top_level():
    """Pixtral's, which leaves its sizes to the class."""
    tower = {"model_type": "pixtral", "head_dim": 64, "rope_theta": 10000.0}
    raw = {"model_type": "llava", "text_config": LLAMA, "vision_config": tower}
    assert "PD057" not in codes(raw)


def test_a_runtime_without_the_outer_class_has_no_such_model():
    raw = {"model_type": "idefics3", "text_config": LLAMA}
    got = emulate(raw)["mlx-lm"]
    assert (got.known, got.error) == ("no model", "mlx-lm has no model for 'idefics3'")
    assert emulate({**raw, "model_type": "lighton_ocr"})["transformers-4"].known == "no model"
    assert emulate({**raw, "model_type": "mistral3"})["mlx-lm"].is_known


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("xlm-roberta", {"position_embedding_type": "rotary"}),
        ("mpt", {"attn_config": {"rope": True, "rope_theta": 500000}}),
    ],
)
def test_a_vendors_own_rotation_in_a_family_without_one_is_not_known(tmp_path, name, own):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": name}))
    with pytest.raises(NoRotationError):
        load(path)
    path.write_text(json.dumps({**SIZES, "model_type": name, **own}))
    with pytest.raises(UnknownFamilyError):
        meaning_of(load(path).config)


def test_servers_read_the_longrope_of_minicpm3_as_of_any_model():
    """Only DeepSeek's own files rename the type for latent attention."""
    lists = {"short_factor": [1.5, 2.0], "long_factor": [1.5, 2.0]}
    raw = {
        **SIZES,
        "model_type": "minicpm3",
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 8192, **lists},
    }
    meant = meaning_of(raw).computed
    for server in ("vllm", "sglang"):
        got = emulate(raw)[server]
        assert (got.error, got.softmax_scale) == (None, meant.softmax_scale)
        assert got.rotations["all"].inv_freq == pytest.approx(meant.rotations["all"].inv_freq)


def test_dynamic_names_no_runtime_that_is_not_known():
    dynamic = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    raw = {**SIZES, "model_type": "hunyuan_v1_dense", "head_dim": 16, "rope_scaling": dynamic}
    assert not [f for f in judge(raw) if f.code == "PD025" and "vllm" in f.message]
    assert emulate({**raw, "partial_rotary_factor": 0.5})["transformers-5"].rotations == (
        emulate(raw)["transformers-5"].rotations
    )


def test_a_null_share_of_minimax_m2_is_the_whole_head():
    raw = {**SIZES, "model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8}
    got = emulate({**raw, "partial_rotary_factor": None})["transformers-5"]
    assert len(got.rotations["all"].inv_freq) == 8


@pytest.mark.parametrize("count", [0, -4])
def test_no_head_of_keys_is_an_error(count):
    assert "PD049" in codes({**LLAMA, "num_key_value_heads": count}, severity="E")


def test_null_is_no_scaling_where_transformers_4_does_not_replace_it():
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "num_hidden_layers": 2}
    raw = {"model_type": "gpt_oss", **sizes, "rope_scaling": None}
    (layer, *_) = emulate(raw)["transformers-4"].rotations.values()
    assert layer.multiplier == 1
