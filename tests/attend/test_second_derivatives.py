"""Second derivatives by the default way, for every encoding, mask and kind of input.

`fast_mode` compares along random directions instead of along every element of every input.
"""

import pytest
import torch

import posenc
from posenc import masks
from posenc.testing.harness import successive_positions

NAMES = tuple(n for n in posenc.names() if not n.startswith(("sinusoidal", "learned", "bert")))
SHAPE = posenc.ModelShape(16, 2, 1, 4, train_length=16)
N = 5


def functions(name, mask, dtype=torch.float64):
    """Attention as a function of q, k, v and the parameters, and these."""
    torch.manual_seed(0)
    encoding = posenc.create(name, SHAPE).for_layer(0).to(dtype)
    p = successive_positions(encoding, N)
    state = encoding.state(torch.randn(1, N, 16, dtype=dtype), p)
    state = None if state is None else state.detach()
    inputs = [torch.randn(1, h, N, 4, dtype=dtype, requires_grad=True) for h in (2, 1, 1)]

    def attend(q, k, v):
        return posenc.attention(
            q,
            k,
            v,
            encoding,
            q_positions=p,
            kv_positions=p,
            mask=mask,
            q_state=state,
            kv_state=state,
        )

    return attend, inputs


@pytest.mark.quick(6)
@pytest.mark.parametrize("name", NAMES)
def test_every_encoding_has_a_second_derivative(name):
    attend, inputs = functions(name, masks.causal)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


VALID = torch.tensor([[False, True, True, True, False]])
MASKS = {
    "none": None,
    "causal": masks.causal,
    "window": masks.causal & masks.sliding_window(2),
    "padding": masks.causal & masks.padding(VALID),  # the first query sees no key
    "prefix": masks.causal | masks.prefix(2),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["nope", "rope", "rove"])
def test_every_mask_has_a_second_derivative(name, mask):
    attend, inputs = functions(name, MASKS[mask])
    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_equal_those_of_the_reference(dtype):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 300, 16).to(dtype) for _ in range(3)]
    where = {"q_positions": range(300), "kv_positions": range(300), "mask": masks.causal}
    found = []
    for impl, kind in (("auto", dtype), ("reference", torch.float64)):
        leaves = [t.to(kind).requires_grad_() for t in inputs]
        out = posenc.attention(*leaves, posenc.RoPE(16, interleaved=False), impl=impl, **where)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        found.append([t.detach().double() for t in (*first, *second)])
    for got, want in zip(*found, strict=True):
        size = float(want.abs().max())
        torch.testing.assert_close(
            got / size, want / size, rtol=0, atol=64 * torch.finfo(dtype).eps
        )


def test_a_plain_backward_pass_runs_the_kernel_and_frees_its_inputs():
    q = torch.randn(1, 2, 40, 16, requires_grad=True)
    out = posenc.attention(q, q, q, q_positions=range(40), kv_positions=range(40))
    with torch.profiler.profile() as profile:
        out.sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert any("flash_attention" in name and "backward" in name for name in names)
    assert not any("softmax" in name for name in names)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
