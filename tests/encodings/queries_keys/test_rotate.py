"""The rotation that every rotary method shares: one result for all sizes, layouts and dtypes; its
CUDA kernel in Triton's interpreter, and compiled without a GPU."""

import gc
import os
import subprocess
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from posenc.encodings.queries_keys import rotate as module
from posenc.encodings.queries_keys.rotate import rotate, rotate_together


@pytest.fixture(params=["plain", "strips"])
def way(request, monkeypatch):
    """Either way for all sizes; strips of several tokens and a remainder."""
    monkeypatch.setattr(
        module, "MAX_TORCH_OPS_ELEMENTS", 1 << 30 if request.param == "plain" else 0
    )
    monkeypatch.setattr(module, "STRIP_ELEMENTS", 500)
    return request.param


def by_hand(x, cos, sin, interleaved):
    """Pair by pair in float64."""
    out = x.double().clone()
    pairs = cos.shape[-1]
    for t in range(pairs):
        a, b = (2 * t, 2 * t + 1) if interleaved else (t, t + pairs)
        c, s = cos[..., None, :, t].double(), sin[..., None, :, t].double()
        first, second = x[..., a].double(), x[..., b].double()
        out[..., a] = first * c - second * s
        out[..., b] = second * c + first * s
    return out


LAYOUTS = {
    "tokens first": lambda: torch.randn(2, 41, 3, 16).transpose(1, 2),
    "heads first": lambda: torch.randn(2, 3, 41, 16),
    "one of three": lambda: torch.randn(2, 41, 3, 3, 16)[:, :, 1].transpose(1, 2),
    "odd offset": lambda: torch.randn(2, 3, 41, 19)[..., 1:17],
    "tokens inside": lambda: torch.randn(2, 3, 16, 41).mT,
    "expanded": lambda: torch.randn(2, 1, 41, 16).expand(-1, 3, -1, -1),
}


def tensors(layout, dtype, batched, rotary_dim):
    torch.manual_seed(0)
    x = LAYOUTS[layout]()
    angle = torch.randn(*((2,) if batched else ()), 41, rotary_dim // 2)
    return x.to(dtype), angle.cos(), angle.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 6, 2])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_equals_pairs_by_hand_in_every_layout(
    layout, batched, rotary_dim, interleaved, way
):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)):
        x, cos, sin = tensors(layout, dtype, batched, rotary_dim)
        want = by_hand(x, cos, sin, interleaved)
        got = rotate(x, cos, sin, interleaved=interleaved)
        assert got.dtype == dtype
        # Rounded once: within one unit of the last place of the exact value.
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


# torch's own forward mode uses it.
of_torch = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.mark.quick(2)
@of_torch
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_and_its_gradients_pass_gradcheck(interleaved, way):
    x, cos, sin = tensors("tokens first", torch.float64, True, 6)
    cos, sin = cos.double() * 1.1, sin.double()  # no pure rotation: the transpose, not the inverse

    cos, sin = cos[:, :5], sin[:, :5]
    x = x[:, :1, :5].clone().requires_grad_()

    def call(x):
        return rotate(x, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(call, (x,), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x,), fast_mode=True)


@pytest.mark.quick(4)
@of_torch
@pytest.mark.parametrize("learned", ["cos", "sin", "both", "all"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_learned_tables_get_their_gradient(interleaved, learned, way):
    x, cos, sin = tensors("heads first", torch.float64, False, 6)
    x, cos, sin = x[:, :2, :2].clone(), cos[:2].double(), sin[:2].double()
    cos.requires_grad_(learned != "sin")
    sin.requires_grad_(learned != "cos")
    x.requires_grad_(learned == "all")

    def call(x, cos, sin):
        return rotate(x, cos, sin, interleaved=interleaved)

    options = {"check_forward_ad": True, "check_batched_grad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(call, (x, cos, sin), **options)
    assert torch.autograd.gradgradcheck(call, (x, cos, sin), fast_mode=True)


@of_torch
@pytest.mark.parametrize("interleaved", [False, True])
def test_transforms_of_torch_find_what_they_find_for_plain_operations(interleaved, monkeypatch):
    x, cos, sin = tensors("tokens first", torch.float64, True, 6)
    x, angle = x[:, :2, :5], torch.atan2(sin, cos)[:, :5].double()
    weight = torch.randn_like(x)

    def loss(x, angle):
        k = x[:, :1] * 2
        out, out_k = rotate_together((x, k), angle.cos(), angle.sin(), interleaved=interleaved)
        return (out.sin() * weight[: len(x)]).sum() + out_k.square().sin().sum()

    func: Any = torch.func
    alone = x[:, None], angle[:, None]  # a batch of batches of one
    transforms = {
        "grad": lambda: func.grad(loss, (0, 1))(x, angle),
        "jvp": lambda: func.jvp(loss, (x, angle), (weight, angle.sin())),
        "jvp of x": lambda: func.jvp(lambda x: loss(x, angle), (x,), (weight,)),
        "vmap": lambda: func.vmap(loss)(*alone),
        "vmap of angles": lambda: func.vmap(loss, (None, 0))(x[:1], alone[1]),
        "vmap of x": lambda: func.vmap(loss, (0, None))(alone[0], angle[:1]),
        "vmap of grad": lambda: func.vmap(func.grad(loss, (0, 1)))(*alone),
        "grad of vmap": lambda: func.grad(lambda *a: func.vmap(loss)(*a).sum(), (0, 1))(*alone),
        "grad of vmap of angles": lambda: func.grad(
            lambda angle: func.vmap(loss, (None, 0))(x[:1], angle).sum()
        )(alone[1]),
        "jvp of grad": lambda: func.jvp(func.grad(loss, (0, 1)), (x, angle), (weight, angle.sin())),
        "hessian": lambda: func.hessian(loss, 1)(x[:, :, :2], angle[:, :2]),
    }
    weight_of = {"hessian": weight[:, :, :2]}
    for name, transform in transforms.items():
        found, whole = [], weight
        weight = weight_of.get(name, weight)
        for few in (0, 1 << 30):
            monkeypatch.setattr(module, "MAX_TORCH_OPS_ELEMENTS", few)
            found.append(transform())
        weight = whole
        torch.testing.assert_close(*found, msg=lambda text, name=name: f"{name}: {text}")


@of_torch
def test_a_tangent_of_forward_mode_passes_through_without_autograd(way):
    x, cos, sin = tensors("tokens first", torch.float32, False, 6)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(rotate(dual, cos, sin, interleaved=True)).tangent
    want = rotate(torch.ones_like(x), cos, sin, interleaved=True)
    torch.testing.assert_close(tangent, want)


@pytest.mark.quick(1)
def test_nothing_of_x_is_kept_for_the_backward_pass_where_tables_are_fixed(way):
    x, cos, sin = tensors("tokens first", torch.float32, False, 16)
    x = x.clone().requires_grad_() * 1
    seen = weakref.ref(x)
    out = rotate(x, cos, sin, interleaved=False)
    del x
    gc.collect()
    assert seen() is None and out.requires_grad


@pytest.mark.quick(4)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tracers_and_modes_see_every_operation(interleaved, grad, way):
    x, cos, sin = tensors("tokens first", torch.float32, False, 6)
    other = torch.randn_like(x).requires_grad_(grad)

    def call(x):
        return rotate(x, cos, sin, interleaved=interleaved)

    want = call(other).detach()
    with torch.set_grad_enabled(grad):
        assert torch.equal(make_fx(call)(x)(other), want)
        traced: Any = torch.jit.trace(call, x, check_trace=False)
        torch.testing.assert_close(traced(other), want)
        exported = torch.export.export(Rotating(call), (x,)).module()
        torch.testing.assert_close(exported(other), want)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert call(mode.from_tensor(x)).shape == x.shape
    with FlopCounterMode(display=False):
        assert torch.equal(call(other), want)


class Rotating(torch.nn.Module):
    """A function as a module, as torch.export takes it."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_traces_without_a_graph_break(interleaved, way):
    x, cos, sin = tensors("tokens first", torch.float32, False, 16)
    traced = torch.compile(rotate, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        traced(x.requires_grad_(), cos, sin, interleaved=interleaved),
        rotate(x, cos, sin, interleaved=interleaved),
    )


@pytest.mark.parametrize("shape", [(40, 8), (43, 8), (3, 41, 8), (41, 12)])
def test_tables_that_do_not_fit_are_refused(shape, way):
    x, cos = torch.randn(2, 3, 41, 22), torch.ones(shape)
    with pytest.raises(RuntimeError, match=r"must match|expanded size"):
        rotate(x, cos, cos, interleaved=True)
    with pytest.raises(RuntimeError, match=r"must match|expanded size"):
        rotate(x, cos, cos, interleaved=False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_no_tokens_stay_no_tokens(interleaved, way):
    x, table = torch.randn(1, 2, 0, 8), torch.randn(0, 4)
    assert rotate(x, table, table, interleaved=interleaved).shape == x.shape


@pytest.mark.slow
def test_the_kernel_equals_the_eager_rotation_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.encodings.queries_keys.rotation_kernel", "interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "576 cases agree in the interpreter\n"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernel_moves_16_bytes_at_a_time_and_spills_nothing(dtype, interleaved):
    """All architectures: `make kernels`."""
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="needs triton")
    if not hasattr(compiler, "get_ptxas"):  # triton 3.2, which torch 2.6 brings
        pytest.skip("this triton describes a kernel for compiling without a card in another way")
    from tests.encodings.queries_keys import rotation_kernel

    ptx, registers, spilled = rotation_kernel.of_cuda(90, dtype, interleaved, "whole")
    rotation_kernel.check_wide(ptx)
    assert 0 < registers <= 128 and spilled == 0
    strided, _, _ = rotation_kernel.of_cuda(90, dtype, interleaved, "whole", channel_stride=2)
    with pytest.raises(AssertionError):
        rotation_kernel.check_wide(strided)


def test_tensors_of_two_devices_are_refused_before_a_launch():
    pytest.importorskip("triton", reason="triton is not installed")
    from posenc.encodings.queries_keys import triton_rotation

    x, table = torch.zeros(1, 2, 3, 8), torch.zeros(1, 3, 4)
    with pytest.raises(RuntimeError, match="must be on one device, got cpu, meta"):
        triton_rotation.rotate_by_kernel((x, x), table, table.to("meta"), False)


@pytest.mark.parametrize(
    ("version", "used"), [(None, False), ("2.1.0", False), ("3.0.0", True), ("3.9.0+git", True)]
)
def test_without_triton_or_with_an_old_one_the_rotation_is_plain(version, used, monkeypatch):
    triton = None if version is None else types.SimpleNamespace(__version__=version)
    monkeypatch.setitem(sys.modules, "triton", triton)
    assert module.has_triton.__wrapped__() is used
