"""The Toeplitz path: the same bits from run to run, and a cut that changes nothing."""

import torch

import posenc
from posenc import masks


def call(encoding, q, k, v, impl):
    positions = torch.arange(q.shape[2])
    return posenc.attention(
        q, k, v, encoding, q_positions=positions, kv_positions=positions, mask=masks.causal,
        impl=impl,
    )  # fmt: skip


def inputs(length, heads=4):
    torch.manual_seed(0)
    return [torch.randn(1, heads, length, 16, requires_grad=True) for _ in range(3)]


def test_a_learned_tables_gradient_is_right_and_the_same_bits_every_time():
    encoding = posenc.T5Bias(4)
    q, k, v = inputs(600)
    grads = {
        name: torch.autograd.grad(call(encoding, q, k, v, impl).sin().sum(), encoding.weight)[0]
        for name, impl in (("first", "sdpa"), ("second", "sdpa"), ("dense", "reference"))
    }
    assert torch.equal(grads["first"], grads["second"])
    error = (grads["first"] - grads["dense"]).norm() / grads["dense"].norm()
    assert error < 1e-5


def test_cutting_weights_below_the_smallest_normal_number_changes_nothing():
    encoding = posenc.ALiBi(4)
    q, k, v = inputs(1500)
    torch.testing.assert_close(
        call(encoding, q, k, v, "sdpa"), call(encoding, q, k, v, "reference"), rtol=1e-5, atol=1e-5
    )


def test_a_window_computes_only_what_it_shows():
    q, k, v = inputs(1500)
    positions = torch.arange(1500)
    mask = masks.causal & masks.sliding_window(64)
    arguments = {"q_positions": positions, "kv_positions": positions, "mask": mask}
    plan = posenc.explain(q.detach(), k.detach(), v.detach(), posenc.ALiBi(4), **arguments)
    assert plan.impl == "sdpa"
    assert "64" in plan.time
    assert {"reference", "blockwise", "flex"} <= set(plan.rejected)
