"""An attached encoding keeps the model's scale of the scores."""

import copy

import pytest
import torch

import posenc
from tests.hf_models import transformers

HEADS, HEAD_DIM = 4, 8
SIZES = {
    "vocab_size": 90,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
}
TOKENS = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))


def llama() -> torch.nn.Module:
    return built(transformers.LlamaModel(transformers.LlamaConfig(**SIZES)))


def granite(multiplier: float) -> torch.nn.Module:
    config = transformers.GraniteConfig(**SIZES, attention_multiplier=multiplier)
    return built(transformers.GraniteModel(config))


def built(model: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # initial scores are close to 0
        if parameter.ndim == 2:
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    return model.eval()


@torch.no_grad()
def hidden(model: torch.nn.Module, encoding: posenc.PositionEncoding) -> torch.Tensor:
    with posenc.hf.attached(model, encoding):
        return model(TOKENS).last_hidden_state


@pytest.mark.parametrize("make", [llama, lambda: granite(0.9)])
def test_a_table_of_zeros_moves_nothing(make):
    t5 = posenc.T5Bias(HEADS)
    torch.nn.init.zeros_(t5.weight)
    without = hidden(make(), posenc.PositionEncoding())
    torch.testing.assert_close(hidden(make(), t5), without)
    t5.unscaled = True
    assert (hidden(llama(), t5) - hidden(llama(), posenc.PositionEncoding())).abs().max() > 0.01


def test_all_terms_of_deberta_have_the_models_scale():
    """score = s (q . k + q . K + k . Q): a model of another s equals one with q and Q times the
    ratio."""
    torch.manual_seed(0)
    encoding = posenc.DeBERTa(HEADS * HEAD_DIM, HEADS, max_distance=4)
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter) / 3
    ratio = 0.9 * HEAD_DIM**0.5
    usual, moved = granite(HEAD_DIM**-0.5), copy.deepcopy(encoding)
    for layer in usual.layers:
        layer.self_attn.q_proj.weight.data *= ratio
    moved.pos_query.weight.data *= ratio
    moved.pos_query.bias.data *= ratio
    each, other = (posenc.PerLayer([e, e]) for e in (encoding, moved))  # no copy for each layer
    torch.testing.assert_close(
        hidden(granite(0.9), each), hidden(usual, other), rtol=1e-4, atol=1e-4
    )
