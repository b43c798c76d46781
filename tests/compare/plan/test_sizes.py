"""The sizes of the decoder: options before a config before defaults."""

import dataclasses
import json

import pytest

from posenc.compare.options import Options
from posenc.compare.plan.encodings import ComparedEncoding
from posenc.compare.plan.plan import make_plan, plan_one_trial_per_task
from posenc.compare.plan.sizes import decoder_sizes, layers_of_config
from posenc.compare.trial.config import Architecture, read_trial, write_trial
from tests.compare.trial.test_trial import TINY

LLAMA = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "model_type": "llama",
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "model_type": "gpt2"}
QWEN3 = {**LLAMA, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8}


def sizes(config, tmp_path, **options) -> tuple[int, ...]:
    path = None
    if config is not None:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
    found = decoder_sizes(Options(config=path, **options))
    return found["width"], found["layers"], found["heads"], found["kv_heads"]


@pytest.mark.parametrize(
    ("config", "options", "want"),
    [
        (None, {}, (64, 4, 4, 4)),
        (None, {"heads": 2, "layers": 1}, (64, 1, 2, 2)),
        (None, {"heads": 8, "kv_heads": 2}, (64, 4, 8, 2)),
        (LLAMA, {}, (256, 6, 8, 2)),
        (GPT2, {}, (48, 3, 4, 4)),
        ({"text_config": LLAMA, "hidden_size": 7}, {}, (256, 6, 8, 2)),
        (LLAMA, {"layers": 2}, (256, 2, 8, 2)),
        (LLAMA, {"heads": 4}, (256, 6, 4, 1)),
        (LLAMA, {"heads": 8}, (256, 6, 8, 2)),
        (LLAMA, {"heads": 16}, (256, 6, 16, 4)),
        (LLAMA, {"heads": 4, "kv_heads": 2}, (256, 6, 4, 2)),
        (LLAMA, {"small": True}, (128, 4, 4, 1)),
        (GPT2, {"small": True}, (48, 3, 4, 4)),
        (QWEN3, {"small": True}, (256, 4, 4, 2)),
        (QWEN3, {}, (256, 6, 16, 8)),
        (QWEN3, {"width": 2048}, (2048, 6, 16, 8)),
        ({**LLAMA, "num_key_value_heads": 1}, {"small": True}, (256, 4, 8, 1)),
    ],
)
def test_sizes(config, options, want, tmp_path):
    assert sizes(config, tmp_path, **options) == want


def test_a_folder_is_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2), encoding="utf-8")
    assert decoder_sizes(Options(config=tmp_path))["width"] == 48


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        ({**LLAMA, "hidden_size": -1}, {}, "hidden_size must be a whole number from 1"),
        ({**LLAMA, "hidden_size": None}, {}, "hidden_size must be"),
        ({"num_hidden_layers": 2}, {}, "it has none of hidden_size, n_embd, d_model"),
        ({**LLAMA, "num_key_value_heads": 3}, {}, "3 key/value heads do not divide 8 query heads"),
        (LLAMA, {"heads": 2}, "4 query heads share a key/value head, and 2 make no whole groups"),
        (None, {"small": True}, "--small needs --config"),
        (None, {"kv_heads": 3}, "--kv-heads 3 does not divide --heads 4"),
    ],
)
def test_a_config_without_usable_sizes_is_refused(config, options, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        sizes(config, tmp_path, **options)


def test_a_config_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises((ValueError, OSError), match=r"gone\.json"):
        decoder_sizes(Options(config=tmp_path / "gone.json"))
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json"):
        decoder_sizes(Options(config=tmp_path / "config.json"))


def test_the_trials_have_the_sizes_of_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    options = Options(config=tmp_path, small=True, device="cpu")
    (trial,) = plan_one_trial_per_task(options, [ComparedEncoding("rope", "rope", "")])
    assert (trial.width, trial.layers, trial.heads, trial.kv_heads) == (128, 4, 4, 1)


def architecture(config, tmp_path, **options) -> Architecture:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    layers = layers_of_config(Options(config=path, **options))
    assert layers is not None
    return layers.architecture


QWEN3_LAYERS = {
    **QWEN3,
    "model_type": "qwen3",
    "intermediate_size": 768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 4,
    "rope_theta": 1e6,
    "max_position_embeddings": 4096,
    "vocab_size": 1000,
}
WHOLE = Architecture(
    head_dim=128,
    ffn_dim=768,
    qk_norm=True,
    tie_embeddings=True,
    layer_windows=(None, None, None, None, 32, 32),
)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"layers": 5}, {"layer_windows": (None, None, None, None, 32)}),
        ({"layers": 7}, {"layer_windows": (None, None, None, None, 32, 32, None)}),
        ({"heads": 8}, {"head_dim": None}),
        ({"width": 128}, {"head_dim": None, "ffn_dim": 384}),
        ({"small": True}, {"head_dim": None, "ffn_dim": 768, "layer_windows": (None,) * 4}),
        ({"objective": "masked"}, {"tie_embeddings": False}),
    ],
)
def test_layers_of_a_config_fit_the_models_sizes(options, changes, tmp_path):
    want = dataclasses.replace(WHOLE, **changes)
    assert architecture(QWEN3_LAYERS, tmp_path, **options) == want


def test_a_plan_says_in_one_line_what_a_config_gives_and_what_is_left_out(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3_LAYERS), encoding="utf-8")
    plan = make_plan(Options(["rope", "alibi", "rope:rope_theta=50"], config=path, device="cpu"))
    (note,) = plan.notes
    assert note == (
        f"Of {path} are taken: sizes, layers with head_dim 128, ffn_dim 768, tie_embeddings True, "
        "qk_norm True, layer_windows (None, None, None, None, 32, 32), RoPE's base 1e+06. Left "
        "out: max_position_embeddings, vocab_size."
    )
    texts = [trial.encoding for trial in plan.trials[:3]]
    assert texts == ["rope:rope_theta=1000000", "alibi", "rope:rope_theta=50"]
    assert {trial.architecture for trial in plan.trials} == {WHOLE}
    assert plan.recorded is None


def test_a_trial_with_other_layers_is_another_one_and_comes_back_from_its_file(tmp_path):
    trial = dataclasses.replace(TINY, layers=6, architecture=WHOLE)
    assert trial.hash != dataclasses.replace(trial, architecture=Architecture()).hash
    folder = tmp_path / trial.folder
    folder.mkdir()
    write_trial(folder, trial)
    assert read_trial(folder) == trial


def test_layers_that_no_plan_makes_are_refused_in_a_file():
    for changes in (
        {"head_dim": 0},
        {"ffn_dim": -1},
        {"layer_windows": (0,)},
        {"norm": "x" * 2000},
    ):
        with pytest.raises(ValueError):
            Architecture(**changes).check()
