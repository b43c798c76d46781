"""Mistakes that were not seen, and false accusations: each config as a user met it."""

import copy

import pytest

from posenc.doctor.command import Options
from posenc.files.sealed_json import strict_json
from posenc.runtimes.families import all_families
from posenc.runtimes.files.spelling import ROTARY_SHARE_KEYS
from posenc.runtimes.known import emulate
from posenc.runtimes.meaning import meaning_of
from posenc.runtimes.runtime_facts import Transformers5Facts
from tests.doctor.judging import codes, judge, run
from tests.doctor.threads import BASE

SIMPLE = {**BASE, "rope_theta": 10000.0}
NOMIC = {
    "architectures": ["NomicBertModel"],
    "model_type": "nomic_bert",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "vocab_size": 30528,
}
GRANITE4 = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 131072,
    "position_embedding_type": "nope",
    "rope_theta": 10000.0,
}
LLAMA4 = {
    "model_type": "llama4_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "max_position_embeddings": 10485760,
    "rope_theta": 500000.0,
    "attn_temperature_tuning": 4,
    "no_rope_layers": [],
    "rms_norm_eps": 1e-5,
    "use_qk_norm": True,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 1,
    "tie_word_embeddings": False,
    "vocab_size": 128,
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
"""Llama 4 Scout as published, but for the sizes."""
SCOUT = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": LLAMA4,
}


@pytest.mark.parametrize("key", ROTARY_SHARE_KEYS)
def test_a_share_under_another_familys_name_is_seen_where_whole_heads_rotate(key):
    (hit,) = [f for f in judge({**SIMPLE, key: 0.5}) if f.code == "PD043"]
    assert hit.severity == "E" and f"{key} 0.5 is not read for llama" in hit.message
    assert "whole heads" in hit.message and f"Drop {key}" in hit.cure
    assert "PD043" not in codes({**SIMPLE, key: 1.0})


def test_nomics_share_and_the_length_of_its_training():
    assert meaning_of(NOMIC).trained_length == 2048
    assert "PD055" not in codes(NOMIC) and "PD043" not in codes(NOMIC)
    assert "PD043" in codes({**NOMIC, "rotary_emb_fraction": 0.5})


def test_a_word_with_position_in_it_is_not_about_positions():
    assert "PD055" not in codes({**SIMPLE, "is_composition": True})
    assert "PD055" in codes({**SIMPLE, "position_shift": 3})


def test_a_scaling_of_a_model_that_rotates_nothing_is_said_to_have_no_effect(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert "PD061" not in codes(GRANITE4)
    assert "PD061" in codes({**GRANITE4, "rope_scaling": yarn})
    path = tmp_path / "config.json"
    path.write_text(strict_json({**GRANITE4, "rope_scaling": yarn}))
    said, _ = run(Options((path,), ask=["none"]))
    assert "no layer rotates" in said and "1.138" not in said


def test_the_indexers_layout_is_read_by_both_servers():
    glm5 = {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "max_position_embeddings": 202752,
        "rope_theta": 1000000.0,
    }
    for given in ({}, {"indexer_rope_interleave": False}):
        (hit,) = [f for f in judge({**glm5, **given}) if f.code == "PD051"]
        assert hit.runtimes == ("vllm", "sglang") and "vLLM and SGLang take" in hit.message
    assert "PD051" not in codes({**glm5, "indexer_rope_interleave": True})


DRAFT = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {
        **{key: value for key, value in SIMPLE.items() if key != "architectures"},
        "rope_theta": 500000.0,
    },
}
TARGET = {
    **SIMPLE,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}


def test_a_draft_of_speculators_is_read_and_compared_with_its_target(tmp_path):
    draft, target = tmp_path / "draft.json", tmp_path / "target.json"
    draft.write_text(strict_json(DRAFT))
    target.write_text(strict_json(TARGET))
    said, code = run(Options((draft,), ask=["none"]))
    assert code == 0 and "vllm" in said and "opens no such file" in said and "500000" not in said
    said, code = run(Options((target, draft)))
    assert code == 1 and "mean other positions" in said
    with pytest.raises(ValueError, match="Put these rotary keys into its transformer_layer_config"):
        run(Options((draft,), fix=True, out=tmp_path / "new"))


@pytest.mark.parametrize("name", ["nemotron_h", "jamba", "siglip", "clip", "vit"])
def test_a_model_that_rotates_nothing_is_not_taken_for_another_family(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(strict_json({"model_type": name, "hidden_size": 64}))
    said, code = run(Options((path,), ask=["none"]))
    assert code == 0 and "did you mean" not in said and f"{name} has no rotary positions" in said


def flags():
    """(family, key, whether null is taken, too) of every key that a class takes for a flag."""
    for name, line in all_families().items():
        known = Transformers5Facts.of(line.get("transformers5")).checked_keys
        for key in known.booleans:
            yield name, key, False
        for key in known.booleans_or_null:
            yield name, key, True


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key", "may_be_null"), [*flags()])
def test_every_flag_is_refused_by_its_class_as_anything_but_true_or_false(name, key, may_be_null):
    transformers = pytest.importorskip("transformers")
    cls = transformers.CONFIG_MAPPING[name]
    for value in (4, 0, "true", *([] if may_be_null else [None])):
        with pytest.raises(Exception, match=f"{key}.*\n.*expected bool"):
            cls(**{key: value})
    cls(**{key: True})
    if may_be_null:
        cls(**{key: None})


def test_llama_4_as_published_is_refused_by_transformers_5_and_mended(tmp_path):
    answers = emulate(SCOUT)
    assert "expected bool, got int (value: 4)" in answers["transformers-5"].error
    (hit,) = [f for f in judge(SCOUT) if f.code == "PD062"]
    assert hit.severity == "E" and hit.cure == 'Write "attn_temperature_tuning": true.'
    right = copy.deepcopy(SCOUT)
    right["text_config"]["attn_temperature_tuning"] = True
    assert emulate(right)["transformers-5"].error is None and "PD062" not in codes(right)
    path = tmp_path / "config.json"
    path.write_text(strict_json(SCOUT))
    said, code = run(Options((path,), fix=True, out=tmp_path / "new"))
    assert code == 0 and "text_config.attn_temperature_tuning: 4 -> true" in said
    assert "not proved" not in said and "transformers-5" in said


def test_no_fix_guesses_the_base_of_a_kind_of_layers(tmp_path):
    olmo3 = {
        **BASE,
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention"],
        "num_hidden_layers": 2,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    path = tmp_path / "config.json"
    path.write_text(strict_json(olmo3))
    with pytest.raises(ValueError, match="default 500000 for sliding_attention: --fix writes"):
        run(Options((path,), fix=True, out=tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    path.write_text(strict_json({**olmo3, "rope_theta": 500000.0}))
    assert "sliding_attention" in run(Options((path,), fix=True, out=tmp_path / "new"))[0]


def test_llama_4_inside_of_its_whole_is_read_by_mlx_lms_llama4_file():
    """mlx-lm's llama4.py scales; its llama4_text.py, for a file without vision, does not."""
    whole = emulate(SCOUT, runtimes=["mlx-lm"])["mlx-lm"]
    alone = emulate(LLAMA4, runtimes=["mlx-lm"])["mlx-lm"]
    meant = meaning_of({**LLAMA4, "attn_temperature_tuning": True}).computed.rotations["all"]
    assert whole.rotations["all"].inv_freq == pytest.approx(meant.inv_freq)
    assert alone.rotations["all"].inv_freq != pytest.approx(meant.inv_freq)
    assert whole.without_rotation == (3,)
