"""The decoder with the sizes and choices that a config of transformers states, and the weights of
transformers' own model, gives its logits and its gradients."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posenc
from posenc import masks

transformers = pytest.importorskip("transformers")

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS, WORDS, FFN = 32, 4, 2, 16, 3, 60, 48
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": FFN,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # a padding token would have no gradient
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
}
CONFIG = posenc.DecoderConfig(
    WORDS,
    WIDTH,
    LAYERS,
    HEADS,
    KV_HEADS,
    head_dim=HEAD_DIM,
    ffn_dim=FFN,
    norm_eps=1e-5,
)
NAMES = {
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "ffn",
}
QKV_BIASES = {"attention_bias": True, "output_bias": False}
STOCK_MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("Llama", {}, {}),
    "Llama, tied and biased": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"tie_embeddings": True, "attention_bias": True, "ffn_bias": True},
    ),
    "Mistral in a window": ("Mistral", {"sliding_window": 5}, {"layer_windows": (5, 5, 5)}),
    "Qwen2": ("Qwen2", {"head_dim": 8}, {"head_dim": 8, **QKV_BIASES}),
    "Qwen3": ("Qwen3", {"tie_word_embeddings": True}, {"qk_norm": True, "tie_embeddings": True}),
    "Qwen3 with windows": (
        "Qwen3",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
        {"qk_norm": True, "layer_windows": (None, 6, 6)},
    ),
    "Gemma's activation": (
        "Llama",
        {"hidden_act": "gelu_pytorch_tanh"},
        {"activation": "geglu_tanh"},
    ),
}


def stock_model(name: str) -> tuple[nn.Module, posenc.Decoder]:
    """transformers' model with random weights, and the Decoder that should be the same."""
    family, stock_options, our_options = STOCK_MODELS[name]
    torch.manual_seed(0)
    options = {**SIZES, **stock_options}
    stock_config = getattr(transformers, f"{family}Config")(**options)
    theirs = getattr(transformers, f"{family}ForCausalLM")(stock_config).eval()
    for parameter in theirs.parameters():  # no gain at one, no bias at zero
        parameter.data += 0.2 * torch.randn_like(parameter)
    config = dataclasses.replace(CONFIG, **our_options)
    rope = posenc.RoPE(config.head_dim, rope_theta=5000.0, interleaved=False)
    mine = posenc.Decoder(config, rope).eval()
    mine.load_state_dict(our_weights(theirs))
    return theirs, mine


def our_weights(theirs: nn.Module) -> dict[str, Tensor]:
    """The weights of transformers' model under the names that they have here."""
    return {our_name(name): tensor for name, tensor in theirs.named_parameters()}


def our_name(name: str) -> str:
    parts = name.removeprefix("model.").split(".")
    if parts[0] == "embed_tokens":
        return "tokens.weight"
    if parts[0] == "lm_head":
        return "head.weight"
    return ".".join(NAMES.get(part, part) for part in parts)


def tokens(length: int = 20) -> Tensor:
    return torch.randint(WORDS, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", STOCK_MODELS)
def test_logits_and_gradients_are_those_of_transformers(name, recompute):
    theirs, mine = stock_model(name)
    mine.config = dataclasses.replace(mine.config, recompute=recompute)
    ids = tokens()
    our_logits = mine(ids)
    their_logits = theirs(ids).logits
    assert our_logits.std() > 0.1
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=1e-5)
    weights = torch.randn(our_logits.shape, generator=torch.Generator().manual_seed(2))
    (our_logits * weights).mean().backward()
    (their_logits * weights).mean().backward()
    ours = dict(mine.named_parameters())
    for their_name, parameter in theirs.named_parameters():
        gradient = ours[our_name(their_name)].grad
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5 * scale)


@torch.no_grad()
@pytest.mark.parametrize("name", ["Qwen3 with windows", "Mistral in a window"])
def test_windows_of_layers_hold_token_by_token(name):
    _, mine = stock_model(name)
    ids = tokens()
    caches = mine.new_caches()
    steps = [mine(ids[:, i : i + 1], caches=caches) for i in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), mine(ids), rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_layers_window_is_that_of_a_mask():
    _, mine = stock_model("Mistral in a window")
    ids = tokens()
    in_window = mine(ids)
    mine.config = dataclasses.replace(mine.config, layer_windows=None)
    assert not torch.allclose(in_window, mine(ids), atol=1e-2)
    masked = mine(ids, mask=masks.causal & masks.sliding_window(5))
    torch.testing.assert_close(in_window, masked, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer_windows": (4, 4)}, r"layer_windows must be a tuple with a window.* 3 layers"),
        ({"layer_windows": 4}, r"layer_windows must be a tuple"),
        ({"layer_windows": (4, 0, None)}, "a window of layer_windows must be"),
        ({"qk_norm": 1}, "qk_norm must be True or False, got 1"),
        ({"output_bias": "no"}, "output_bias must be True or False, got 'no'"),
        ({"recompute": None}, "recompute must be True or False, got None"),
        ({"norm_eps": -1.0}, "norm_eps must not be negative, got -1"),
        ({"activation": "geglu"}, "activation must be one of swiglu, geglu_tanh"),
    ],
)
def test_choices_that_no_layer_has_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(CONFIG, **options)
    if "norm_eps" in options:
        with pytest.raises(ValueError, match="qk_norm_eps must not be negative"):
            posenc.Attention(32, 4, qk_norm_eps=-1.0)
