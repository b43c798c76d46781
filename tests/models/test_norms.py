"""RMSNorm: the paper's formula, and torch's gradients."""

import contextlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from posenc.attend.projection import project
from posenc.models.norms import BLOCK, RMSNorm
from posenc.models.swiglu import swiglu
from posenc.numbers import native
from tests.compilers import kept_apart, needs_c_compiler


@pytest.mark.parametrize("shape", [(3, 5, 8), (2, 41), (1, 1, 3)])
def test_rms_norm_has_the_paper_s_values_and_gradients(shape):
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(shape[-1], eps=1e-3).double()
    x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(shape[-1], generator=generator))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, x),
        (x, norm.weight),
    )


@pytest.mark.parametrize("compiled", [pytest.param("1", marks=needs_c_compiler), "0"])
@pytest.mark.parametrize("threads", [1, 2])
def test_rms_norm_equals_torch_in_float32_with_and_without_gradients(
    compiled, threads, monkeypatch, request
):
    monkeypatch.setenv("POSENC_NATIVE", compiled)
    native.load.cache_clear()
    before = torch.get_num_threads()
    request.addfinalizer(lambda: (torch.set_num_threads(before), native.load.cache_clear()))
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    ours, theirs = RMSNorm(64, eps=1e-6), torch.nn.RMSNorm(64, eps=1e-6)
    x = torch.randn(4, 7, 64, generator=generator) * 10
    grads, outs = [], []
    for norm in (ours, theirs):
        leaf = x.clone().requires_grad_()
        out = norm(leaf)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        grads.append((leaf.grad, norm.weight.grad))
        outs.append(out)
        torch.testing.assert_close(out, theirs(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(ours(x), outs[0])


def test_rms_norm_runs_in_bfloat16_and_under_autocast():
    x = torch.randn(2, 3, 16, requires_grad=True)
    half = RMSNorm(16).bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        out = RMSNorm(16, eps=1e-6)(x)
    out.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


class Gate(torch.nn.Module):
    """What autocast gives to the pass over a feed-forward, and to a product of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(32, 64, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return swiglu(x, self.gate, self.up, self.down) + project(x, self.gate, self.up)[1]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [lambda: RMSNorm(32), Gate], ids=["norm", "gate"])
def test_a_trace_sees_plain_operations(kind, grad):
    """C is invisible to it: what it recorded would be the memory as it was."""
    module, first, second = kind(), *torch.randn(2, 3, 50, 32)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(module, first, check_trace=False)
        torch.testing.assert_close(traced(second), module(second), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [lambda: RMSNorm(32), Gate], ids=["norm", "gate"])
def test_a_tensor_without_memory_never_reaches_c(kind):
    module = kind()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        got = module(mode.from_tensor(torch.randn(3, 50, 32)))
    assert got.shape[:2] == (3, 50)


@needs_c_compiler
def test_threads_do_not_decide_the_last_bits_of_a_gradient():
    torch.manual_seed(0)
    before, norm, found = torch.get_num_threads(), RMSNorm(8), []
    x, grad = torch.randn(2, 3 * BLOCK + 7, 8)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(torch.autograd.grad(norm(x), norm.weight, grad)[0])
        finally:
            torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_saved_tensors_may_come_back_with_other_strides():
    torch.manual_seed(0)
    norm, (x, grad), found = RMSNorm(16), torch.randn(2, 3, 5, 16), []
    for keeping in (contextlib.nullcontext(), kept_apart()):
        leaf = x.clone().requires_grad_()
        with keeping:
            found.append(torch.autograd.grad(norm(leaf * 1), (leaf, norm.weight), grad))
    assert all(map(torch.equal, *found))
