"""The sizes of the decoder: options before a config before defaults."""

import json

import pytest

from posenc.compare.options import Options
from posenc.compare.plan.encodings import ComparedEncoding
from posenc.compare.plan.plan import plan_one_trial_per_task
from posenc.compare.plan.sizes import decoder_sizes

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
        (QWEN3, {}, "16 heads of 128 have 2048 channels.* is 256.* --width 2048"),
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
