"""What a config says of its layers: held to the model that transformers builds from it."""

import json
from typing import Any

import pytest
import torch

import posenc
from posenc.hf.checkpoint.check_config import read_text_config
from posenc.hf.checkpoint.decoder_of_config import _FAMILIES, decoder_of_config
from tests.models.test_stock_decoders import our_name

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_theta": 500.0}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads, tied": ("Llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 5, "rms_norm_eps": 1e-3}),
    "mistral without windows": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": ("Qwen2", WINDOWS),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3 with windows": ("Qwen3", {"head_dim": 8, **WINDOWS}),
    "gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1], "pad_token_id": 0}),
}


def config_of(name: str, tmp_path) -> tuple[Any, dict[str, Any]]:
    """The config of transformers, and config.json as it writes it."""
    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **options})
    config.save_pretrained(tmp_path)
    return config, read_text_config(tmp_path / "config.json")


@pytest.mark.parametrize("name", MODELS)
def test_the_decoder_of_a_config_is_the_model_that_transformers_builds(name, tmp_path):
    stock_config, raw = config_of(name, tmp_path)
    found = decoder_of_config(raw, tmp_path)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(stock_config).eval()
    for parameter in theirs.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    config = posenc.DecoderConfig(60, 32, 3, 4, 2, **found.choices)
    rope = posenc.RoPE(config.head_dim, rope_theta=found.rope_theta, interleaved=False)
    mine = posenc.Decoder(config, rope).eval()
    mine.load_state_dict({our_name(n): tensor for n, tensor in theirs.named_parameters()})
    ids = torch.randint(60, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(mine(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_decoder_of_gpt2s_config(tmp_path):
    transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4).save_pretrained(tmp_path)
    found = decoder_of_config(read_text_config(tmp_path / "config.json"), tmp_path)
    # tests/models/test_stock_weights.py holds a decoder of these choices to transformers' model.
    assert found.choices == {
        "head_dim": 8,
        "ffn_dim": None,
        "norm": "layer",
        "norm_eps": 1e-5,
        "activation": "gelu_tanh",
        "ffn_bias": True,
        "tie_embeddings": True,
        "attention_bias": True,
        "output_bias": None,
        "qk_norm": False,
        "layer_windows": None,
    }
    assert found.rope_theta is None
    assert found.left_out == (
        "attn_pdrop",
        "embd_pdrop",
        "n_positions",
        "resid_pdrop",
        "vocab_size",
        "its table of positions",
    )


LLAMA = {"model_type": "llama", **{k: v for k, v in SIZES.items() if v is not None}}


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({}, ""),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "the rope_type linear"),
        ({"hidden_act": "relu2"}, "the activation relu2"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"logits_scaling": 8.0}, "logits_scaling"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 3}, "1 layers without rotation"),
        ({"model_type": "gemma", "head_dim": 8}, "the scale of embeddings"),
        (
            {"model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 6},
            "the base 10000 of sliding_attention",
        ),
        ({"model_type": "olmo9", "qk_norm": True, "rope_theta": 1e6}, "qk_norm"),
    ],
)
def test_every_field_that_is_left_out_is_named(changes, left_out, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    found = decoder_of_config(read_text_config(path), path)
    assert {"vocab_size", "max_position_embeddings"} <= set(found.left_out)
    assert not left_out or left_out in found.left_out


def test_of_an_unknown_family_nothing_but_sizes_is_taken(tmp_path):
    raw = {**LLAMA, "model_type": "olmo9", "head_dim": 16, "rope_theta": 1e6}
    found = decoder_of_config(raw, tmp_path)
    assert (found.choices, found.rope_theta) == ({"head_dim": 16}, None)
    assert {"intermediate_size", "rope_theta"} <= set(found.left_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": "wide"}, "intermediate_size or n_inner must be a whole number"),
        ({"intermediate_size": -1}, "must be a whole number from 1 on, got -1"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps or layer_norm_epsilon must be a small number"),
        ({"sliding_window": 0, "model_type": "mistral"}, "sliding_window must be a whole number"),
        ({"sliding_window": "5", "model_type": "mistral"}, "sliding_window must be a whole number"),
        ({"hidden_act": ["silu"]}, "hidden_act must be a name"),
        (
            {"model_type": "qwen3", "sliding_window": 4, "layer_types": ["sliding_attention"]},
            "layer_types names 1 layers, and there are 3",
        ),
    ],
)
def test_values_that_no_model_has_are_refused(changes, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        decoder_of_config(read_text_config(path), path)


@pytest.mark.parametrize("name", ["qwen2 with windows", "qwen3 with windows"])
def test_a_config_without_layer_types_has_the_same_windows(name, tmp_path):
    _, raw = config_of(name, tmp_path)
    listed = decoder_of_config(raw, tmp_path).choices["layer_windows"]
    del raw["layer_types"]
    assert decoder_of_config(raw, tmp_path).choices["layer_windows"] == listed == (None, 6, 6)


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_what_a_config_leaves_out_is_what_its_class_fills_in(family, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model(family, **sizes)
    found = decoder_of_config({"model_type": family, **sizes}, tmp_path).choices
    eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
    assert found["norm_eps"] == eps
    assert found["head_dim"] == (getattr(config, "head_dim", None) or 16)
    assert found["tie_embeddings"] is config.tie_word_embeddings
    windows = set(found["layer_windows"] or ()) - {None}
    assert windows == {getattr(config, "sliding_window", None)} - {None}
