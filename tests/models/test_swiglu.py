"""The gated feed-forward under autocast: what its three layers give by themselves, each way."""

import contextlib
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from posenc.models import swiglu as module
from posenc.models.swiglu import BLOCK, GROUP, MOST, ROWS, swiglu
from posenc.numbers import native
from tests.compilers import kept_apart, needs_c_compiler, without_memory

IN, HIDDEN, OUT = 64, 96, 32
in_one_pass = pytest.mark.skipif(
    native.load_if_suited(module.SOURCE) is None,
    reason="no compiler here, or a processor without bfloat16 in vectors, or with tiles of it",
)


@pytest.fixture(autouse=True)
def one_thread():
    """Few tokens are too few for a pass of several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def reloaded():
    """Libraries are looked for in this test, and again after it."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.fixture(params=[pytest.param("pass", marks=in_one_pass), "gate", "plain"])
def way(request, monkeypatch, reloaded):
    """In one pass, with C for the gate alone, and without a compiler."""
    if request.param == "gate":
        monkeypatch.setattr(module, "_in_one_pass", lambda *_: False)
    if request.param == "plain":
        monkeypatch.setenv("POSENC_NATIVE", "0")
    return request.param


@pytest.fixture
def passes(monkeypatch) -> list:
    """One entry for each pass."""
    seen, run = [], module._OnePass.apply
    monkeypatch.setattr(module._OnePass, "apply", lambda *given: seen.append(1) or run(*given))
    return seen


def three(in_features=IN, hidden=HIDDEN, out=OUT) -> list[nn.Linear]:
    torch.manual_seed(0)
    sizes = (in_features, hidden), (in_features, hidden), (hidden, out)
    return [nn.Linear(*size, bias=False) for size in sizes]


def plainly(x, gate, up, down):
    return down(F.silu(gate(x)) * up(x))


def some_input(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def found(function, x, layers, cast=True, dtype=torch.float32) -> list[torch.Tensor]:
    """The output and all gradients of a loss that weighs every number of it."""
    x = x.detach().clone().to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if cast else contextlib.nullcontext():
        out = function(x, *layers)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    wanted = [x, *(layer.weight for layer in layers)]
    return [out, *torch.autograd.grad(out, wanted, weights)]


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def as_exact_as_autocast(x: torch.Tensor, layers: list[nn.Linear]) -> None:
    exact = found(plainly, x, [deepcopy(layer).double() for layer in layers], False, torch.float64)
    of_torch = found(plainly, x, layers)
    for ours, theirs, true in zip(found(swiglu, x, layers), of_torch, exact, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert off(ours, true) <= 1.1 * off(theirs, true) <= 0.05


@pytest.mark.parametrize("shape", [(ROWS,), (3, 77), (2, 3, 99)])
@pytest.mark.parametrize("sizes", [(IN, HIDDEN, OUT), (32, 320, 288)])
def test_each_way_is_as_exact_as_autocast_s_own(way, shape, sizes, monkeypatch, passes):
    monkeypatch.setattr(module, "GROUP", 2 * ROWS)
    as_exact_as_autocast(some_input(*shape, sizes[0]) * 3, three(*sizes))
    assert bool(passes) == (way == "pass")


@pytest.mark.parametrize(("tokens", "sizes"), [(ROWS, (20, 44, 36)), (40, (IN, HIDDEN, OUT))])
def test_sizes_that_the_pass_does_not_take_are_as_exact(tokens, sizes, passes):
    as_exact_as_autocast(some_input(tokens, sizes[0]) * 3, three(*sizes))
    assert not passes


@in_one_pass
def test_one_pass_is_taken_where_it_pays_and_nowhere_else(passes, monkeypatch):
    def takes(tokens, layers=None, **sizes) -> bool:
        passes.clear()
        layers = layers or three(**sizes)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            swiglu(some_input(tokens, layers[0].in_features), *layers)
        return bool(passes)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert takes(ROWS) and takes(GROUP + 1)
    assert not takes(ROWS - 1), "preparing the weights would take longer than the products"
    for odd in ({"in_features": 65}, {"hidden": 100}, {"out": 33}):
        assert not takes(ROWS, **odd), "a width that fills no block"
    wide = MOST // IN // BLOCK * BLOCK
    assert takes(ROWS, hidden=wide) and not takes(ROWS, hidden=wide + BLOCK)
    wide = MOST // HIDDEN // BLOCK * BLOCK
    assert takes(ROWS, out=wide) and not takes(ROWS, out=wide + BLOCK)
    watched = three()
    watched[2].register_forward_hook(lambda *_: None)
    assert not takes(ROWS, watched)
    passes.clear()
    with torch.no_grad():
        swiglu(some_input(ROWS, IN), *three())
    assert not passes, "no autocast"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert takes(2 * GROUP + 1) and not takes(2 * GROUP), "a thread would have nothing to do"


@in_one_pass
def test_testing_takes_the_way_of_training_and_both_give_the_same_bits():
    layers, x = three(), some_input(3, 50, IN)
    trained = found(swiglu, x, layers)[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(swiglu(x, *layers), trained)


def test_a_layer_that_learns_nothing_gets_no_gradient(way):
    layers, x = three(), some_input(2, 80, IN).requires_grad_()
    want = found(swiglu, x, layers)[1:]
    for frozen in ([], [0], [0, 1], [0, 1, 2]):
        for i, layer in enumerate(layers):
            layer.weight.requires_grad_(i not in frozen)
            layer.weight.grad = x.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            out = swiglu(x, *layers)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        assert x.grad is not None and torch.equal(x.grad, want[0])
        for i, (layer, grad) in enumerate(zip(layers, want[1:], strict=True)):
            got = layer.weight.grad
            assert (got is None) == (i in frozen)
            assert got is None or torch.equal(got, grad)


@pytest.mark.parametrize("shape", [(IN, 160), (2, IN, 80)])
def test_inputs_and_gradients_may_lie_anywhere(way, shape):
    layers, x = three(), some_input(*shape)
    apart = x.mT.detach().requires_grad_()
    beside = x.mT.contiguous().requires_grad_()
    sums = []
    for leaf in (apart, beside):
        with torch.autocast("cpu", torch.bfloat16):
            out = swiglu(leaf, *layers)
        out.sum().backward()  # an expanded gradient
        sums.append((out, leaf.grad))
    for got, want in zip(*sums, strict=True):
        assert torch.equal(got, want)
    half = found(swiglu, beside, layers, dtype=torch.bfloat16)
    assert half[1].dtype == torch.bfloat16
    assert off(half[0], sums[1][0]) < 0.01


def test_a_gradient_of_another_dtype_is_rounded_first(way):
    layers, x = three(), some_input(ROWS, IN).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu(x, *layers)
    grad = some_input(ROWS, OUT)
    found = [torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in (grad, grad.bfloat16())]
    assert torch.equal(*found)


def test_a_gate_far_from_its_middle_is_open_or_closed(way):
    layers, x = three(), some_input(ROWS, IN)
    x[::2] *= 500
    as_exact_as_autocast(x, layers)


def test_a_nan_stays_with_its_token_and_reaches_every_weight(way):
    layers, x = three(), some_input(ROWS + 3, IN)
    for value in (torch.nan, torch.inf):
        x[ROWS + 1, 3] = value
        out, d_x, *d_weights = found(swiglu, x, layers)
        others = torch.arange(len(x)) != ROWS + 1
        assert not out[ROWS + 1].isfinite().any()
        assert out[others].isfinite().all() and d_x[others].isfinite().all()
        assert not any(grad.isfinite().all() for grad in d_weights)


@in_one_pass
def test_threads_do_not_decide_the_last_bits(passes):
    layers, x, seen = three(), some_input(2 * GROUP + 77, IN), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        seen.append(found(swiglu, x, layers))
    for one, two, three_ in zip(*seen, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three_)
    assert len(passes) == 3


@in_one_pass
def test_c_says_so_where_the_system_gives_no_memory():
    library = native.load_if_suited(module.SOURCE)
    assert library is not None
    for function, pointers in ((library.forward, 5), (library.backward, 8)):
        with pytest.raises(MemoryError, match=function.__name__):
            native.run(function, 1, *[None] * pointers, (ROWS, 1 << 40, BLOCK, BLOCK, GROUP))


def test_sizes_that_do_not_fit_are_refused_as_torch_refuses_them(way):
    """What C takes for the size of one would be read past the end of another."""
    gate, up, down = three()
    other, wider = three(2 * IN)[0], three(hidden=2 * HIDDEN)
    x, wide, odd = (some_input(2 * ROWS, width) for width in (IN, 2 * IN, 65))
    with torch.autocast("cpu", torch.bfloat16):
        for given in (
            (wide, gate, up, down), (odd, gate, up, down),
            (x, gate, wider[1], down), (x, gate, other, down), (x, gate, up, wider[2]),
        ):  # fmt: skip
            with pytest.raises(RuntimeError, match=r"must match|cannot be multiplied"):
                swiglu(*given)
        one = nn.Linear(IN, 1, bias=False)  # torch broadcasts it
        assert off(swiglu(x, gate, one, down), plainly(x, gate, one, down)) < 0.01


@pytest.mark.parametrize("which", [(2,), (0, 1, 2)])
def test_a_bias_is_added(way, which):
    layers = three()
    for i in which:
        layers[i] = nn.Linear(layers[i].in_features, layers[i].out_features)
    as_exact_as_autocast(some_input(ROWS, IN), layers)


def test_a_weight_may_lie_transposed(way):
    layers, x = three(), some_input(ROWS, IN)
    want = found(swiglu, x, layers)
    for layer in layers:
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    assert all(map(torch.equal, found(swiglu, x, layers), want))


def test_a_second_derivative_is_refused(way):
    x = some_input(ROWS, IN).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu(x, *three())
    (grad,) = torch.autograd.grad(out.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_saved_tensors_may_come_back_with_other_strides(way):
    layers, x = three(), some_input(ROWS, IN)
    want = found(swiglu, x, layers)
    with kept_apart():
        assert all(map(torch.equal, found(swiglu, x, layers), want))


@in_one_pass
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_no_memory_is_an_error_and_not_a_result(name, monkeypatch):
    layers, x = three(), some_input(ROWS, IN)
    with torch.autocast("cpu", torch.bfloat16):
        out = swiglu(x, *layers)

        class Short:
            forward = staticmethod(without_memory("forward"))
            backward = staticmethod(without_memory("backward"))

        monkeypatch.setattr(module, "_library", Short)
        with pytest.raises(MemoryError, match=name):
            out.sum().backward() if name == "backward" else swiglu(x, *layers)


def test_numbers_that_python_and_c_share_are_the_same():
    own = module.SOURCE.read_text(encoding="utf-8")
    shared = (native.HEADERS / "products.h").read_text(encoding="utf-8")
    assert f"#define ROWS {ROWS}\n" in own and f"#define BLOCK {BLOCK} " in shared
    assert GROUP % ROWS == 0


@needs_c_compiler
def test_a_processor_without_products_of_bfloat16_gets_no_pass(monkeypatch, tmp_path, reloaded):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-U__AVX512BF16__"))
    layers, x = three(), some_input(ROWS, IN)
    assert not module._in_one_pass(x, layers[0], layers[2])
    assert off(found(swiglu, x, layers)[0], plainly(x, *layers)) < 0.01
