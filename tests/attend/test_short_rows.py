"""Short rows under autocast: as close to float32 as autocast itself, with a compiler and
without."""

import contextlib

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.attention import explain
from posenc.attend.kernels import by_head, short_rows
from posenc.numbers import native
from tests.compilers import kept_apart, needs_c_compiler, without_memory

HEADS, WIDTH, BATCH = 4, 16, 3
KERNELS = (*(pytest.param(name, marks=needs_c_compiler) for name in ("heads", "rows")), "torch")


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """With by_head.c, with short_rows.c and products by torch, and without a compiler."""
    monkeypatch.setenv("POSENC_NATIVE", str(int(request.param != "torch")))
    native.load.cache_clear()
    if request.param == "heads" and by_head.compiled() is None:
        pytest.skip("this processor has no products of bfloat16 in vectors, or has them in tiles")
    if request.param == "rows":
        monkeypatch.setattr(by_head, "compiled", lambda: None)
    yield request.param
    native.load.cache_clear()


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


def inputs(q_len: int, kv_len: int, kv_heads: int = HEADS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(BATCH, heads, length, WIDTH, requires_grad=True)
        for heads, length in ((HEADS, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    ]


def run(impl, tensors, encoding, where, mask, cast=True, state=None):
    """Output and gradients, of the encoding's parameters too."""
    with bfloat16() if cast else contextlib.nullcontext():
        q, k, v = (t.to(torch.bfloat16) for t in tensors) if cast else tensors
        out = posenc.attention(
            q, k, v, encoding, q_positions=where[0], kv_positions=where[1], mask=mask, impl=impl,
            q_state=state, kv_state=state,
        )  # fmt: skip
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    wanted = [*tensors, *(() if encoding is None else encoding.parameters())]
    grads = torch.autograd.grad((out.float() * weight).sum(), wanted, allow_unused=True)
    return [out.float(), *(g for g in grads if g is not None)]


def errors(got, want):
    return [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]


MASKS = {
    "causal": (masks.causal, 40, 40),
    "window": (masks.causal & masks.sliding_window(5), 40, 40),
    "everything": (None, 40, 40),
    "later queries": (masks.causal, 9, 40),
    "documents": (masks.causal & masks.document(torch.arange(40) // 13), 40, 40),
    "longest row": (masks.causal, 33, 512),
}
NAMES = ("nope", "rope", "alibi", "t5", "kerple", "sandwich")


@pytest.mark.parametrize(("name", "which"), [(n, m) for n in NAMES for m in MASKS])
def test_it_is_as_close_to_float32_as_the_reference_under_autocast(name, which, kernel):
    mask, q_len, kv_len = MASKS[which]
    encoding = posenc.create(name, posenc.ModelShape(HEADS * WIDTH, HEADS, 2))
    where = torch.arange(kv_len - q_len, kv_len), torch.arange(kv_len)
    tensors = inputs(q_len, kv_len, kv_heads=2)
    want = run("reference", tensors, encoding, where, mask, cast=False)
    near = errors(run("reference", tensors, encoding, where, mask), want)
    mine = errors(run("short_rows", tensors, encoding, where, mask), want)
    for own, other in zip(mine, near, strict=True):
        assert own <= 1.5 * other + 8e-3


@pytest.mark.parametrize("name", ["fire", "fox", "alibi"])
def test_a_bias_of_each_row_of_the_batch_and_of_any_strides(name, kernel):
    encoding = posenc.create(name, posenc.ModelShape(HEADS * WIDTH, HEADS))
    positions = torch.arange(30) + torch.tensor([[0], [7], [3]])
    where = (positions, positions)
    x = torch.randn(BATCH, 30, HEADS * WIDTH, generator=torch.Generator().manual_seed(5))
    state = encoding.state(x, positions)
    tensors = inputs(30, 30)
    want = run("reference", tensors, encoding, where, masks.causal, cast=False, state=state)
    state = encoding.state(x, positions)
    got = run("short_rows", tensors, encoding, where, masks.causal, state=state)
    # Of what adds up to one number little is left, and that little is coarse.
    assert max(errors(got[:4], want[:4])) < 1e-2
    for own, exact in zip(got[4:], want[4:], strict=True):
        assert (own - exact).norm() < 0.02 * exact.norm() + 0.15


def test_a_constant_that_all_keys_share_has_no_gradient(kernel):
    """Rounded weights do not sum to one; what they leave over must not reach the bias."""
    encoding = posenc.FIRE(num_heads=HEADS)
    where = torch.arange(30), torch.arange(30)
    tensors = inputs(30, 30)
    run("short_rows", tensors, encoding, where, masks.causal)
    with bfloat16():
        q, k, v = (t.to(torch.bfloat16) for t in tensors)
        out = posenc.attention(
            q, k, v + 3, encoding, q_positions=where[0], kv_positions=where[1], mask=masks.causal,
            impl="short_rows",
        )  # fmt: skip
    (grad,) = torch.autograd.grad(out.float().sum(), encoding.out.bias)
    if kernel != "torch":
        assert grad.abs().max() < 1e-3
    assert grad.abs().max() < 3


def test_a_row_that_sees_no_key_gives_zeros_and_no_gradient(kernel):
    tensors = inputs(6, 6)
    valid = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 0, 1, 1, 0], [1] * 6])
    where = torch.arange(6), torch.arange(6)
    mask = masks.causal & masks.padding(valid)
    out, *grads = run("short_rows", tensors, None, where, mask)
    assert (out[0, :, :3] == 0).all() and (out[0, :, 3:] != 0).all()
    assert (grads[0][0, :, :3] == 0).all()
    assert all(g.isfinite().all() for g in grads)


def test_a_nan_stays_one_and_stays_in_its_row(kernel):
    tensors = inputs(20, 20)
    with torch.no_grad():
        tensors[0][1, 2, 7] = torch.nan
    where = torch.arange(20), torch.arange(20)
    out, *_ = run("short_rows", tensors, None, where, masks.causal)
    assert out[1, 2, 7].isnan().all()
    assert out.isnan().sum() == WIDTH


@pytest.mark.parametrize("mask", [None, masks.causal, masks.causal & masks.sliding_window(37)])
@pytest.mark.parametrize(("width", "v_width"), [(16, 16), (33, 7), (64, 80)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (31, 32), (33, 33), (64, 97), (97, 64)])
def test_any_width_and_length_and_strides(q_len, kv_len, width, v_width, mask, kernel):
    torch.manual_seed(0)
    # Heads side by side in each token, as a projection gives them, every second number unused.
    sizes = (q_len, width), (kv_len, width), (kv_len, v_width)
    q, k, v = (
        torch.randn(2, n, 3, 2 * w)[..., ::2].transpose(1, 2).requires_grad_() for n, w in sizes
    )
    where = torch.arange(kv_len - q_len, kv_len), torch.arange(kv_len)
    encoding = posenc.ALiBi(num_heads=3)
    want = run("reference", (q, k, v), encoding, where, mask, cast=False)
    got = run("short_rows", (q, k, v), encoding, where, mask)
    for own, exact in zip(got, want, strict=True):
        assert own.isfinite().all() and own.shape == exact.shape
        assert (own - exact).norm() <= 2e-2 * exact.norm()
        assert (own[exact == 0] == 0).all()


@pytest.mark.parametrize("kernel", KERNELS[:2], indirect=True)
def test_a_hidden_value_whose_gradient_overflows_reaches_nothing(kernel):
    tensors = inputs(20, 20)
    with torch.no_grad():
        tensors[2][:, :, 3] = 3e38
    valid = torch.ones(BATCH, 20, dtype=torch.int64)
    valid[:, 3] = 0
    where = torch.arange(20), torch.arange(20)
    out, *grads = run("short_rows", tensors, None, where, masks.causal & masks.padding(valid))
    seen = torch.arange(20) != 3
    assert out[:, :, seen].isfinite().all() and all(g[:, :, seen].isfinite().all() for g in grads)


@pytest.mark.parametrize("shift", [10, -20])
def test_keys_that_no_query_sees_have_a_gradient_of_zero(shift, kernel):
    """Whatever the memory held before: here NaN, in pieces of every size that C may ask for."""
    torch.manual_seed(0)
    q = torch.randn(2, HEADS, 40, WIDTH, requires_grad=True)
    k, v = (torch.randn(2, HEADS, 90, WIDTH, requires_grad=True) for _ in range(2))
    where = torch.arange(shift, 40 + shift), torch.arange(90)
    for _ in range(5):
        poison = [torch.full((size,), torch.nan) for size in range(10_000, 30_000, 500)]
        del poison
        _, *grads = run("short_rows", (q, k, v), None, where, masks.causal)
        for grad in grads[1:]:
            assert (grad[:, :, 40 + shift :] == 0).all() and (grad[:, :, : 40 + shift] != 0).any()


def test_another_default_dtype_changes_no_gradient(kernel):
    encoding, where = posenc.T5Bias(HEADS), (torch.arange(30), torch.arange(30))
    want = run("short_rows", inputs(30, 30), encoding, where, masks.causal)
    tensors, weight = (
        inputs(30, 30),
        torch.randn(3, HEADS, 30, WIDTH, generator=torch.Generator().manual_seed(1)),
    )
    torch.set_default_dtype(torch.float64)
    try:
        with bfloat16():
            out = posenc.attention(
                *(t.to(torch.bfloat16) for t in tensors), encoding, q_positions=where[0],
                kv_positions=where[1], mask=masks.causal, impl="short_rows",
            )  # fmt: skip
        got = torch.autograd.grad((out.float() * weight).sum(), [*tensors, *encoding.parameters()])
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, want[1:], strict=True))


def test_large_scores_and_biases_stay_finite(kernel):
    where = torch.arange(40), torch.arange(40)
    tensors = inputs(40, 40)
    with torch.no_grad():
        tensors[0].mul_(100)
    encoding = posenc.ALiBi(num_heads=HEADS)
    want = run("reference", tensors, encoding, where, masks.causal, cast=False)
    got = run("short_rows", tensors, encoding, where, masks.causal)
    assert all(g.isfinite().all() for g in got)
    near = errors(run("reference", tensors, encoding, where, masks.causal), want)
    assert all(a <= 1.5 * b + 1e-2 for a, b in zip(errors(got, want), near, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads, kernel):
    encoding = posenc.T5Bias(HEADS)
    where = torch.arange(40), torch.arange(40)
    before = torch.get_num_threads()
    want = run("short_rows", inputs(40, 40), encoding, where, masks.causal)
    torch.set_num_threads(threads)
    try:
        got = run("short_rows", inputs(40, 40), encoding, where, masks.causal)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_gradient_of_its_gradient_is_that_of_plain_operations(kernel):
    def twice(impl):
        q, k, v = inputs(12, 12)
        table = posenc.T5Bias(HEADS)
        torch.manual_seed(3)
        torch.nn.init.normal_(next(table.parameters()))
        with bfloat16():
            out = posenc.attention(
                q, k, v, table, q_positions=torch.arange(12), kv_positions=torch.arange(12),
                mask=masks.causal, impl=impl,
            )  # fmt: skip
        weight = next(table.parameters())
        first = torch.autograd.grad(out.float().square().sum(), (q, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v, weight))

    assert max(errors(twice("short_rows"), twice("reference"))) < 5e-2


def test_what_it_does_not_do_it_refuses_and_auto_takes_another():
    where = {"q_positions": torch.arange(20), "kv_positions": torch.arange(20)}
    q, k, v = inputs(20, 20)
    cases = {
        "autocast": ((q, k, v, None), {}, contextlib.nullcontext()),
        "changes scores": ((q, k, v, posenc.Shaw(WIDTH)), {}, bfloat16()),
        "log-sum-exp": ((q, k, v, None), {"return_lse": True}, bfloat16()),
        "dropout": ((q, k, v, None), {"dropout_p": 0.1}, bfloat16()),
        "computes in bfloat16": ((q, k, v, None), {}, torch.autocast("cpu", torch.float16)),
        "training": ((*(t.detach() for t in (q, k, v)), None), {}, bfloat16()),
    }
    for reason, (arguments, options, context) in cases.items():
        with context, pytest.raises(ValueError, match=reason):
            posenc.attention(*arguments, **where, **options, mask=masks.causal, impl="short_rows")
        with context:
            plan = explain(*arguments, **where, **options, mask=masks.causal)
        assert plan.impl != "short_rows"
    long = inputs(8, 513)
    with bfloat16(), pytest.raises(ValueError, match="513 keys are more than 512"):
        posenc.attention(
            *long, q_positions=torch.arange(8), kv_positions=torch.arange(513), impl="short_rows"
        )
    with bfloat16():
        assert (
            explain(q, k, v, posenc.T5Bias(HEADS), **where, mask=masks.causal).impl == "short_rows"
        )


def test_numbers_that_python_and_c_share_are_the_same():
    shared = native.HEADERS / "products.h"
    rows, heads = (path.read_text(encoding="utf-8") for path in (short_rows.SOURCE, shared))
    assert f"#define MOST {short_rows.MOST_KEYS} " in rows
    assert f"#define BLOCK {by_head.BLOCK} " in heads


@needs_c_compiler
def test_a_processor_without_products_of_bfloat16_gets_no_kernel_of_heads(monkeypatch, tmp_path):
    """It says so, and what was compiled stays: it is not built again by each process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-U__AVX512BF16__"))
    native.load.cache_clear()
    assert by_head.compiled() is None
    (made,) = (tmp_path / "posenc").glob("*.so")
    before = made.stat().st_mtime_ns
    native.load.cache_clear()
    assert by_head.compiled() is None and made.stat().st_mtime_ns == before
    native.load.cache_clear()


def test_no_memory_is_an_error_that_says_so(monkeypatch):
    class Full:
        attend = without_memory("attend")

    monkeypatch.setattr(by_head, "compiled", lambda: Full)
    with pytest.raises(MemoryError, match="attend: no memory"):
        run("short_rows", inputs(6, 6), None, (torch.arange(6),) * 2, masks.causal)


def test_saved_tensors_may_come_back_with_other_strides(kernel):
    given, where, bias = inputs(40, 40), (torch.arange(40), torch.arange(40)), posenc.T5Bias(HEADS)
    want = run("short_rows", given, bias, where, masks.causal)
    with kept_apart():
        got = run("short_rows", given, bias, where, masks.causal)
    assert all(error < 0.01 for error in errors(got, want))  # torch's products round otherwise
