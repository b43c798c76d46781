"""A bias of -inf hides a key as a mask does, also all keys that the mask shows to a query."""

import pytest
import torch

import posenc
from posenc import masks

WAYS = ("auto", "reference", "blocks", "sdpa")


class Near(posenc.DistanceBias):
    claims = posenc.Claims(places=(3,), source="a test")

    def bias(self, distance):
        return torch.zeros(distance.shape).masked_fill(distance.abs() >= 4, -torch.inf)[None]


class Earlier(posenc.DistanceBias):
    claims = posenc.Claims(places=(3,), source="a test")

    def bias(self, distance):
        return torch.zeros(distance.shape).masked_fill(distance < 1, -torch.inf)[None]


def dense(q, k, v, bias, visible):
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()
    scores = scores.masked_fill(~visible, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return weights @ v.double(), scores.logsumexp(-1)


@pytest.mark.parametrize("impl", WAYS)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("mask", [masks.causal, None, masks.sliding_window(3)])
@pytest.mark.parametrize("q_len, kv_len, start", [(4, 4, 0), (300, 300, 0), (9, 6, -3), (6, 9, -3)])
def test_a_query_sees_neither_what_bias_nor_what_mask_hides(
    q_len, kv_len, start, mask, trained, impl
):
    q = torch.randn(1, 2, q_len, 16, requires_grad=trained)
    k, v = torch.randn(2, 1, 2, kv_len, 16)
    where = {"q_positions": range(start, start + q_len), "kv_positions": range(kv_len)}
    distance = torch.arange(start, start + q_len)[:, None] - torch.arange(kv_len)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if mask is not None:
        visible = distance >= 0 if mask.causal else distance.abs() < 3
    for encoding in (Near(), Earlier(), posenc.ALiBi(num_heads=2, form="left_right")):
        wanted = dense(q, k, v, encoding.bias(distance), visible)
        out, lse = posenc.attention(
            q, k, v, encoding, mask=mask, return_lse=True, impl=impl, **where
        )
        torch.testing.assert_close(out.double(), wanted[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(lse.double(), wanted[1], atol=1e-5, rtol=1e-6)
        if trained:
            (gradient,) = torch.autograd.grad((out * v[:, :, :1]).sum(), q)
            (right,) = torch.autograd.grad((wanted[0] * v[:, :, :1]).sum(), q)
            torch.testing.assert_close(gradient, right, atol=1e-5, rtol=0)


def test_a_query_without_a_key_has_no_weights():
    q = k = torch.randn(1, 1, 4, 16)
    where = {"q_positions": range(4), "kv_positions": range(4)}
    weights = posenc.attention_weights(q, k, Earlier(), mask=masks.causal, **where)
    assert weights[0, 0, 0].tolist() == [0, 0, 0, 0] and weights[0, 0, 1].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("name", ["rerope", "leaky_rerope", "self_extend", "dual_chunk"])
@pytest.mark.parametrize("impl", ["auto", "blocks"])
def test_passes_join_where_one_of_them_sees_no_key(name, impl):
    mapped = posenc.create(name, posenc.ModelShape(32, 2, 2, 16, train_length=16))
    encoding, (q, k, v) = posenc.Compose(mapped, Near()), torch.randn(3, 1, 2, 40, 16)
    options = {"q_positions": range(40), "kv_positions": range(40), "mask": masks.causal}
    wanted = posenc.attention(q, k, v, encoding, impl="reference", **options)
    found = posenc.attention(q, k, v, encoding, impl=impl, **options)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    q.requires_grad_(True)
    options["kv_positions"] = range(20, 60)  # the first 20 queries see no key
    found = posenc.attention(q, k, v, mapped, impl=impl, **options)
    assert torch.autograd.grad(found.square().sum(), q)[0].isfinite().all()


def test_dape_keeps_hidden_what_its_bias_hides():
    encoding = posenc.DAPE(posenc.ALiBi(num_heads=2, form="left_right"), 2)
    q, k = torch.randn(2, 1, 2, 6, 16)
    weights = posenc.attention_weights(
        q, k, encoding, q_positions=range(6), kv_positions=range(6), mask=masks.causal
    )
    assert weights.isfinite().all() and torch.allclose(weights.sum(-1), torch.ones(1, 2, 6))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("impl", ["auto", "reference", "blocks"])
@pytest.mark.parametrize("name", ["alibi", "cope", "shaw", "rerope", "t5"])
def test_keys_that_no_query_sees_may_be_nan(name, impl, trained):
    encoding = posenc.create(name, posenc.ModelShape(32, 2, 2, 16, train_length=32))
    q, k, v = torch.randn(3, 1, 2, 40, 16)
    valid = torch.ones(1, 40, dtype=torch.bool)
    valid[:, :7] = False
    options = {"q_positions": range(40), "kv_positions": range(40), "impl": impl}
    options["mask"] = masks.causal & masks.padding(valid)
    wanted = posenc.attention(q, k, v, encoding, **options)
    k[:, :, :7] = v[:, :, :7] = torch.nan
    q.requires_grad_(trained)
    found = posenc.attention(q, k, v, encoding, **options)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    if trained:
        assert torch.autograd.grad(found.square().sum(), q)[0].isfinite().all()
