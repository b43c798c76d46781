"""Attention under autocast: it rounds q, k and v as half types do, and no bias."""

import pytest
import torch

import posenc
from posenc import masks
from tests.attending import attend

HEADS, WIDTH, LENGTH = 4, 16, 600
POSITIONS = torch.arange(LENGTH)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def inputs(name: str):
    torch.manual_seed(0)
    shape = posenc.ModelShape(HEADS * WIDTH, HEADS, train_length=128)
    encoding = posenc.create(name, shape).for_layer(0)
    q, k, v = (torch.randn(1, HEADS, LENGTH, WIDTH) for _ in range(3))
    state = encoding.state(torch.randn(1, LENGTH, HEADS * WIDTH), POSITIONS)
    return encoding, q, k, v, None if state is None else state.detach()


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, 5, LENGTH])
@pytest.mark.parametrize("name", ["alibi", "fox", "kerple", "sandwich"])
@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_a_bias_of_hundreds_is_not_rounded(name, rows, mask):
    encoding, *tensors, state = inputs(name)
    ids = POSITIONS // (LENGTH - 5)
    shown = masks.causal
    if mask == "documents":
        shown = shown & masks.document(ids[-rows:], ids)

    def attended(q, k, v, **how):
        return attend(q[:, :, -rows:], k, v, encoding, POSITIONS, shown, state, **how)

    want = attended(*tensors, impl="reference")
    rounded = attended(*(t.bfloat16() for t in tensors), impl="reference")
    with autocast():
        found = attended(*tensors)
    error, allowed = (found - want).abs().amax(), 2 * (rounded - want).abs().amax()
    assert error <= allowed, f"off by {error:.3f}, half types by {allowed / 2:.3f}"


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    "name, impl, exact",
    [
        *((name, "sdpa", True) for name in ("alibi", "fox", "t5", "kerple")),
        *((name, "auto", False) for name in ("nope", "shaw")),
        *((name, "blocks", False) for name in ("nope", "fox", "t5", "shaw")),
    ],
)
def test_gradients_may_be_taken_within_it(name, impl, exact):
    """Those of kernels that compute in float32 are the same bits."""
    encoding, q, k, v, state = inputs(name)

    def gradients(inside: bool) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        with autocast():
            out = attend(*leaves, encoding, POSITIONS, state=state, impl=impl)
            if inside:
                return list(torch.autograd.grad(out.sin().sum(), leaves))
        return list(torch.autograd.grad(out.sin().sum(), leaves))

    allowed = 0.0 if exact else 0.03
    for inside, outside in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(inside, outside, rtol=allowed, atol=allowed)
