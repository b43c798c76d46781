"""The CPU kernel of the rotation, compiled on the spot: against pairs by hand, and its fallback."""

import os
import signal

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from posenc.numbers import native
from posenc.queries_keys.rotation import cpu as rope_cpu
from posenc.queries_keys.rotation import kernel as rope
from posenc.queries_keys.rotation.rotate import rotate as rotate_anything
from tests.compilers import needs_c_compiler
from tests.queries_keys.test_rotate import by_hand

LAYOUTS = {
    "tokens first": lambda: torch.randn(2, 41, 3, 22).transpose(1, 2),
    "heads first": lambda: torch.randn(2, 3, 41, 22),
    "one of three": lambda: torch.randn(2, 41, 3, 3, 22)[:, :, 1].transpose(1, 2),
    "odd offset": lambda: torch.randn(2, 3, 41, 25)[..., 1:23],
    "expanded": lambda: torch.randn(2, 1, 41, 22).expand(-1, 3, -1, -1),
}


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(rope_cpu, "PAYS_FROM", 1)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tables(batched=False, pairs=8):
    angle = torch.randn(*((2, 1) if batched else (1,)), 41, pairs)
    return angle.cos(), angle.sin()


def half_ulp(x):
    """Half the distance between bfloat16 neighbours at x, and float32's own rounding."""
    return 2.0 ** (torch.frexp(x.double()).exponent - 9) + 1e-6 * x.double().abs() + 1e-7


@needs_c_compiler
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("pairs", [1, 7, 8, 11, 16, 32, 35, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_equals_pairs_by_hand_rounded_once(
    layout, pairs, batched, interleaved, threads, monkeypatch
):
    torch.manual_seed(0)
    x, (cos, sin) = LAYOUTS[layout](), tables(batched, pairs)
    x = x if 2 * pairs <= x.shape[-1] else torch.cat([x] * -(-2 * pairs // 22), -1)
    monkeypatch.setattr(rope_cpu, "TILE", 5 * pairs)  # several tiles and a remainder
    monkeypatch.setattr(rope_cpu, "PIECE", 4 * 3 * x.shape[-1] * 4)  # of three heads in float32
    for count in (1, 3):
        threads(count)
        for dtype in (torch.float32, torch.bfloat16):
            kept = x.to(dtype) if dtype != x.dtype else x
            assert rope.takes([kept], cos)
            got = rope.rotate([kept], cos, sin, interleaved)[0]
            shaped = [t.squeeze(-3) if batched else t[0] for t in (cos, sin)]
            want = by_hand(kept, *shaped, interleaved)
            assert got.dtype == dtype
            error = (got.double() - want).abs()
            assert (error <= (2e-6 if dtype == torch.float32 else half_ulp(want))).all()


@needs_c_compiler
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [7, 32])
def test_no_nan_becomes_a_number_whatever_its_bits(pairs, interleaved):
    nans = torch.tensor([0x7F810000, 0x7FFF0000, 0x7FFFFFFF, 0x7F800001, -1, -8388607])
    nans = nans.to(torch.int32).view(torch.float32)
    assert nans.isnan().all()
    for place in range(3):
        x = torch.ones(1, 2, len(nans), 2 * pairs, dtype=torch.bfloat16)
        cos, sin = torch.full((2, 1, len(nans), pairs), 0.5)
        if place == 0:
            for i in range(len(nans)):  # the upper halves, as bfloat16 holds them
                upper = (nans[i].view(torch.int32) >> 16 | 1).to(torch.int16)
                x.view(torch.int16)[:, :, i] = upper
        else:
            (cos, sin)[place - 1][:] = nans[None, :, None]
        assert x.isnan().all() or (cos + sin).isnan().all()
        assert rope.rotate([x], cos, sin, interleaved)[0].isnan().all()


@needs_c_compiler
def test_ties_round_to_even_and_no_number_comes_of_nan_or_infinity():
    x = torch.ones(1, 1, 41, 16, dtype=torch.bfloat16)
    x[..., :8] += torch.arange(8) * 2.0**-7
    x[0, 0, 3, 0], x[0, 0, 4, 0] = float("nan"), float("inf")
    cos, sin = torch.ones(1, 41, 8), torch.full((1, 41, 8), -(2.0**-8))
    cos[0, 7] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # also a NaN
    got = rope.rotate([x], cos, sin, False)[0]
    want = x[..., :8].float() * cos + 2.0**-8  # between two bfloat16 numbers
    assert torch.equal(got[..., :8].isnan(), want.isnan())
    kept = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got[0, 0, kept, :8], want[0, 0, kept].bfloat16())


@needs_c_compiler
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_is_the_one_of_plain_operations(interleaved, monkeypatch):
    torch.manual_seed(0)
    x, (cos, sin) = LAYOUTS["tokens first"]().requires_grad_(), tables()
    grad = torch.randn(2, 3, 41, 22)
    found = []
    for smallest in (1, 1 << 40):
        monkeypatch.setattr(rope_cpu, "PAYS_FROM", smallest)
        out = rotate_anything(x, cos[0], sin[0], interleaved=interleaved)
        found.append(torch.autograd.grad(out, x, grad)[0])
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@needs_c_compiler
def test_operator_is_seen_by_a_tracer_and_keeps_the_rules_of_torch():
    torch.manual_seed(0)
    x, (cos, sin) = torch.randn(2, 3, 41, 22), tables()
    torch.library.opcheck(torch.ops.posenc.rotate, ([x], cos, sin, True))
    traced = make_fx(lambda x: rotate_anything(x, cos[0], sin[0], interleaved=True))(x)
    other = torch.randn(2, 3, 41, 22)
    torch.testing.assert_close(traced(other), rope.rotate([other], cos, sin, True)[0])


@pytest.mark.parametrize("shape", [(1, 40, 8), (3, 1, 41, 8), (1, 41, 12)])
def test_tables_that_do_not_fit_never_reach_the_kernel(shape):
    x, cos = torch.randn(2, 3, 41, 22), torch.ones(shape)
    assert not rope.takes([x], cos)
    with pytest.raises(RuntimeError):
        rotate_anything(x, cos.squeeze(-3) if cos.ndim == 4 else cos[0], cos[0], interleaved=True)


@needs_c_compiler
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_rotates_with_threads_of_its_own(threads):
    threads(2)
    x, (cos, sin) = torch.randn(2, 3, 41, 22), tables()
    want = rope.rotate([x], cos, sin, True)[0]
    child = os.fork()
    if child == 0:  # leaves without pytest's own ending
        signal.alarm(20)  # OpenMP would wait for threads that the child does not have
        os._exit(0 if torch.equal(rope_cpu.rotate(x, cos, sin, True), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("broken", ["switched off", "failing compiler", "no place to write"])
def test_without_the_kernel_plain_operations_answer(broken, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if broken == "switched off":
        monkeypatch.setenv("POSENC_NATIVE", "0")
    elif broken == "failing compiler":
        monkeypatch.setenv("CC", "false")
    else:
        (tmp_path / "posenc").write_text("a file where the folder should be")
    native.load.cache_clear()
    try:
        x, (cos, sin) = torch.randn(2, 3, 41, 22), tables()
        assert not rope.takes([x], cos)
        got = rotate_anything(x, cos[0], sin[0], interleaved=True)
        torch.testing.assert_close(got.double(), by_hand(x, cos[0], sin[0], True))
    finally:
        native.load.cache_clear()
