"""Attention without queries, or without keys: zeros, with zero gradients for whatever would have
had gradients."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.testing.contract import maker
from posenc.testing.harness import (
    SHAPE,
    OneLayerModel,
    build_encoding,
    random_embeddings,
    successive_positions,
)


def attend(encoding: posenc.PositionEncoding, q_len: int, kv_len: int, dtype=torch.float32):
    """Return the output of attention for random q, k and v, which need no gradient themselves."""
    positions = successive_positions(encoding, max(q_len, kv_len))
    x = random_embeddings(len(positions), batch=2, dtype=dtype)
    state = encoding.state(x, positions)
    q, k, v = (
        torch.randn(2, heads, n, 16, dtype=dtype)
        for heads, n in ((4, q_len), (2, kv_len), (2, kv_len))
    )
    return posenc.attention(
        q,
        k,
        v,
        encoding,
        q_positions=positions[:q_len],
        kv_positions=positions[:kv_len],
        q_state=None if state is None else state[:, :, :q_len],
        kv_state=None if state is None else state[:, :, :kv_len],
        mask=masks.causal,
    )


def gradients(encoding: posenc.PositionEncoding, out: torch.Tensor) -> dict[str, torch.Tensor]:
    if not out.requires_grad:
        return {}
    encoding.zero_grad()
    out.sum().backward()
    return {n: p.grad for n, p in encoding.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("name", posenc.names())
def test_parameters_get_zero_gradients(name, q_len, kv_len):
    encoding = build_encoding(maker(name)).for_layer(0)
    wanted = set(gradients(encoding, attend(encoding, 5, 5)))
    out = attend(encoding, q_len, kv_len)
    assert out.shape == (2, 4, q_len, 16) and not out.any()
    found = gradients(encoding, out)
    assert wanted <= set(found)
    assert not any(grad.any() for grad in found.values())


@pytest.mark.parametrize("name", posenc.names())
def test_a_layer_of_no_tokens_trains_nothing(name):
    model = OneLayerModel(build_encoding(maker(name)), SHAPE)
    for length in (5, 0):
        model.zero_grad()
        x = random_embeddings(length, batch=2, dtype=torch.float32)
        model(x, successive_positions(model.encoding, length)).sum().backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        if length:
            wanted = set(found)
    assert wanted <= set(found)
    assert not any(grad.any() for grad in found.values())


def test_what_is_not_finite_stays_out():
    """Zero queries have no gradient, whatever the keys hold."""
    q, k = torch.randn(1, 2, 0, 8), torch.full((1, 2, 3, 8), torch.inf, requires_grad=True)
    nothing = {"q_positions": torch.arange(0), "kv_positions": torch.arange(3)}
    posenc.attention(q, k, k, None, **nothing).sum().backward()
    assert k.grad is not None and not k.grad.any()
    q, none = torch.full((1, 2, 3, 8), torch.nan, requires_grad=True), torch.randn(1, 2, 0, 8)
    nothing = {"q_positions": torch.arange(3), "kv_positions": torch.arange(0)}
    out = posenc.attention(q, none, none, None, **nothing)
    out.sum().backward()
    assert not out.any() and q.grad is not None and not q.grad.any()


def test_no_new_tokens_after_a_memory_have_no_state():
    encoding = posenc.create("fox", SHAPE)
    model = OneLayerModel(encoding, SHAPE).attention
    memory, x = torch.randn(1, 3, 64), torch.randn(1, 0, 64)
    here = {"memory": memory, "memory_positions": torch.arange(3), "encoding": encoding}
    assert model(x, torch.arange(0), mask=masks.causal, **here).shape == (1, 0, 64)
