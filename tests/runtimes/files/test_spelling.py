"""Vendors' own files read as what they mean."""

import json

import pytest

from posenc.doctor.misreadings import Case
from posenc.doctor.rules import findings
from posenc.frequencies import float64_formulas
from posenc.runtimes.files.source import load
from posenc.runtimes.files.spelling import as_transformers, name_of_spelling
from posenc.runtimes.meaning import meaning_of
from posenc.runtimes.position_record import record_of
from tests.doctor.threads import BASE

META = {
    "dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "vocab_size": 100,
    "norm_eps": 1e-5,
    "multiple_of": 8,
    "rope_theta": 500000.0,
}
MISTRAL = {
    "dim": 64,
    "n_heads": 4,
    "n_kv_heads": 2,
    "n_layers": 2,
    "head_dim": 16,
    "hidden_dim": 128,
    "norm_eps": 1e-5,
    "vocab_size": 100,
    "rope_theta": 1e6,
    "max_position_embeddings": 8192,
    "sliding_window": 256,
}
DEEPSEEK = {
    "dim": 64,
    "n_heads": 4,
    "n_layers": 2,
    "vocab_size": 100,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_seq_len": 16384,
    "original_seq_len": 4096,
    "rope_theta": 10000.0,
    "rope_factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
}


def layer(raw):
    return meaning_of(as_transformers(raw)).computed.rotations["all"]


def test_meta():
    assert name_of_spelling(META) == "meta"
    assert layer(META).inv_freq == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 500000.0)
    )
    scaled = layer({**META, "use_scaled_rope": True})
    factors = float64_formulas.llama3_divisors(16, 500000.0, 8.0, 1.0, 4.0, 8192)
    assert scaled.inv_freq == pytest.approx(
        float64_formulas.divide_each(float64_formulas.unscaled_frequencies(16, 500000.0), factors)
    )
    assert scaled.inv_freq[-1] == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 500000.0)[-1] / 8
    )


@pytest.mark.parametrize(
    "scaled, longest",
    [
        ({}, 2048),
        ({"use_scaled_rope": True}, 131072),  # Llama 3.1, factor 8
        ({"use_scaled_rope": True, "rope_scaling_factor": 32.0}, 131072),  # Llama 3.2
        ({"use_scaled_rope": True, "max_seq_len": 16384}, 16384),
        ({"use_scaled_rope": False, "max_seq_len": 4096}, 4096),
    ],
)
def test_meta_means_the_length_of_the_released_models(scaled, longest):
    """As transformers' convert_llama_weights_to_hf.py writes it for the versions of Llama."""
    assert as_transformers({**META, **scaled})["max_position_embeddings"] == longest
    assert meaning_of(as_transformers({**META, **scaled})).max_length == longest


def test_mistral():
    assert name_of_spelling(MISTRAL) == "mistral"
    assert layer(MISTRAL).inv_freq == pytest.approx(float64_formulas.unscaled_frequencies(16, 1e6))
    yarn = {"original_max_position_embeddings": 2048, "factor": 4, "beta": 32.0, "alpha": 1.0}
    on = layer({**MISTRAL, "yarn": {**yarn, "apply_scale": True}})
    off = layer({**MISTRAL, "yarn": {**yarn, "apply_scale": False}})
    assert (
        on.inv_freq
        == off.inv_freq
        == pytest.approx(float64_formulas.yarn_frequencies(16, 1e6, 4, 2048))
    )
    assert (on.multiplier, off.multiplier) == (
        pytest.approx(float64_formulas.yarn_attention_factor(4)),
        1.0,
    )


def test_deepseek():
    assert name_of_spelling(DEEPSEEK) == "deepseek"
    meant = meaning_of(as_transformers(DEEPSEEK)).computed
    assert meant.rotations["all"].inv_freq == pytest.approx(
        float64_formulas.yarn_frequencies(16, 1e4, 40, 4096)
    )
    assert meant.rotations["all"].multiplier == pytest.approx(1.0)
    assert meant.softmax_scale == pytest.approx(
        32**-0.5 * float64_formulas.yarn_attention_factor(40) ** 2
    )
    short = meaning_of(as_transformers({**DEEPSEEK, "max_seq_len": 4096})).computed
    assert short.rotations["all"].inv_freq == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 1e4)
    )
    assert short.softmax_scale == pytest.approx(32**-0.5)


YARN = {"original_max_position_embeddings": 2048, "factor": 4, "beta": 32.0, "alpha": 1.0}
FOUR = {"original_max_position_embeddings": 2048, "beta": 0.1}


@pytest.mark.parametrize(
    "raw, code, word",
    [
        ({**MISTRAL, "llama_4_scaling": FOUR}, "PD055", "llama_4_scaling"),
        ({**MISTRAL, "llama_4_scaling": FOUR, "yarn": YARN}, "PD055", "llama_4_scaling"),
        ({**MISTRAL, "yarn": {**YARN, "facotr": 4}}, "PD010", "facotr"),
        ({**MISTRAL, "yarn": {"facotr": 4, "beta": 32.0}}, "PD047", "facotr"),
        ({**MISTRAL, "yarn": {**YARN, "mscale": 0.7}}, "PD010", "mscale, which its code"),
        ({**MISTRAL, "rope_frobnicate": 7}, "PD055", "rope_frobnicate"),
        ({**META, "rope_frobnicate": 7}, "PD055", "rope_frobnicate"),
        ({**META, "rope_scaling": {"rope_type": "linear", "factor": 4}}, "PD055", "rope_scaling"),
        ({**META, "partial_rotary_factor": 0.5}, "PD055", "partial_rotary_factor"),
        ({**DEEPSEEK, "rope_fator": 7}, "PD055", "rope_fator"),
    ],
)
def test_a_key_that_is_not_translated_is_reported_and_changes_nothing(raw, code, word, tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(raw))
    found = findings(Case(load(tmp_path)))
    assert [f for f in found if f.code == code and word in f.message], found
    usual = {k: v for k, v in raw.items() if k in (*MISTRAL, *DEEPSEEK)}
    if "yarn" in raw:
        usual["yarn"] = {k: v for k, v in raw["yarn"].items() if k in YARN}
    if "factor" in usual.get("yarn", YARN):
        assert layer(raw) == layer(usual)


@pytest.mark.parametrize("raw", [META, MISTRAL, {**MISTRAL, "yarn": YARN}, DEEPSEEK])
def test_every_key_of_a_usual_file_is_translated(raw, tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(raw))
    found = findings(Case(load(tmp_path)))
    assert not {f.code for f in found} & {"PD010", "PD047", "PD055"}


def test_a_yarn_that_is_no_object_is_refused():
    with pytest.raises(ValueError, match="yarn must be an object"):
        as_transformers({**MISTRAL, "yarn": [4]})


def test_other_names_of_base_and_share():
    neox = {**BASE, "model_type": "gpt_neox", "rotary_emb_base": 20000, "rotary_pct": 0.5}
    assert layer(neox).inv_freq == pytest.approx(float64_formulas.unscaled_frequencies(8, 20000.0))
    chatglm = {**BASE, "rope_ratio": 50}
    assert layer(chatglm).inv_freq == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 500000.0)
    )
    assert layer({**BASE, "rotary_base": 30000}).inv_freq == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 30000.0)
    )


def test_a_folder_with_params_json_has_a_record(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL))
    record = record_of(load(tmp_path))
    assert (record.spelling, record.max_length, record.kinds[0].window) == ("mistral", 8192, 256)
    assert record.kinds[0].layers == (0, 1)


@pytest.mark.parametrize("name, value", [("dim", "64"), ("n_heads", 0), ("n_layers", 1.5)])
def test_sizes_that_are_none_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        as_transformers({**META, name: value})


def test_a_record_tells_what_was_assumed(tmp_path):
    raw = {**BASE, "rope_theta": 1e4, "rope_scaling": {"factor": "4.0", "type": "ntk"}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    record = record_of(load(tmp_path))
    assert any("string" in doubt for doubt in record.doubts)
    assert any("ntk" in doubt for doubt in record.doubts)
    wanted = float64_formulas.unscaled_frequencies(16, float64_formulas.ntk_theta(1e4, 4.0, 16))
    assert record.kinds[0].inv_freq == pytest.approx(wanted)


def test_kinds_windows_and_layers_without_rotation():
    gemma = {
        **BASE,
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 64,
        "query_pre_attn_scalar": 64,
    }
    from posenc.runtimes.position_record import record_of_meaning

    record = record_of_meaning(meaning_of(gemma), "transformers", None)
    kinds = {kind.name: kind for kind in record.kinds}
    assert kinds["sliding_attention"].layers == (0, 1, 2, 3, 4)
    assert kinds["full_attention"].layers == (5,)
    assert (kinds["sliding_attention"].window, kinds["full_attention"].window) == (64, None)
    assert record.softmax_scale == pytest.approx(1 / 8)
    smol = {**BASE, "model_type": "smollm3", "rope_theta": 1e6}
    assert record_of_meaning(meaning_of(smol), "transformers", None).without_rotation == (3,)


def test_a_flat_dict_of_a_nested_family_is_meant_for_full_attention():
    gemma = {**BASE, "model_type": "gemma3_text", "query_pre_attn_scalar": 16}
    flat = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    meant = meaning_of({**gemma, "rope_parameters": flat})
    layers = meant.computed.rotations
    assert layers["full_attention"].inv_freq == pytest.approx(
        [f / 8 for f in float64_formulas.unscaled_frequencies(16, 1e6)]
    )
    assert layers["sliding_attention"].inv_freq == pytest.approx(
        float64_formulas.unscaled_frequencies(16, 1e4)
    )
    assert any("flat" in doubt for doubt in meant.doubts)
