"""One or two queries by few_queries.c: what float64 gives, in float32 and rounded to bfloat16."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.kernels import few_queries
from posenc.numbers import native
from tests.compilers import needs_c_compiler, without_memory

pytestmark = needs_c_compiler
HEADS, BATCH = 6, 2
BOUND = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


def given(name, queries, keys, dtype, *, width=32, v_width=32, kv_heads=HEADS):
    """The last tokens of a run and a cache whose heads lie inside its tokens."""
    torch.manual_seed(keys)
    shape = posenc.ModelShape(HEADS * width, HEADS, kv_heads, width, train_length=64)
    encoding = posenc.create(name, shape).for_layer(0)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    positions = torch.arange(keys)
    q = torch.randn(BATCH, HEADS, queries, width).to(dtype)
    k, v = (
        torch.randn(BATCH, keys, kv_heads, w).to(dtype).transpose(1, 2) for w in (width, v_width)
    )
    with torch.no_grad():
        state = encoding.state(torch.randn(BATCH, keys, HEADS * width), positions)
    q_state = None if state is None else state[:, :, keys - queries :]
    return (q, k, v), encoding, {
        "q_positions": positions[keys - queries :], "kv_positions": positions, "q_state": q_state,
        "kv_state": state,
    }  # fmt: skip


@torch.no_grad()
def compare(tensors, encoding, options, mask, exact=None):
    got = posenc.attention(*tensors, encoding, **options, mask=mask, impl="few_queries")
    assert got.dtype == tensors[0].dtype
    states = {n: None if s is None else s.double() for n, s in options.items() if "state" in n}
    want = posenc.attention(
        *(t.double() for t in exact or tensors), encoding.double(), **(options | states), mask=mask,
        impl="reference",
    )  # fmt: skip
    bound = BOUND[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


NAMES = ("nope", "rope", "alibi", "t5", "kerple", "fire", "fox")


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 63), (2, 65), (1, 700)])
@pytest.mark.parametrize("name", NAMES)
def test_it_gives_what_float64_gives(name, queries, keys, dtype):
    compare(*given(name, queries, keys, dtype), masks.causal)


def test_a_query_that_takes_a_part_of_the_term():
    compare(*given("deberta", 1, 700, torch.float32), masks.causal)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("width", "v_width"), [(64, 64), (128, 64), (64, 128), (34, 5)])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_any_width_and_heads_that_share_keys(width, v_width, kv_heads, dtype):
    for queries in (1, 2):
        sizes = {"width": width, "v_width": v_width, "kv_heads": kv_heads}
        compare(*given("alibi", queries, 90, dtype, **sizes), masks.causal)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_what_a_mask_hides_may_hold_anything(dtype):
    tensors, encoding, options = given("t5", 2, 80, dtype)
    valid = torch.ones(BATCH, 80, dtype=torch.int64)
    valid[1, :30] = 0
    mask = masks.causal & masks.padding(valid)
    exact = [t.clone() for t in tensors]
    for t in tensors[1:]:
        t[1, :, :30] = torch.nan
    compare(tensors, encoding, options, mask, exact)
    compare(*given("rope", 2, 80, dtype), masks.causal & masks.sliding_window(9))


@torch.no_grad()
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_row_that_sees_no_key_gives_zeros_and_a_nan_stays_one(dtype):
    (q, k, v), _, options = given("nope", 2, 40, dtype)
    where = options | {"kv_positions": torch.arange(1, 41), "q_positions": torch.tensor([0, 50])}
    out = posenc.attention(q, k, v, **where, mask=masks.causal, impl="few_queries")
    assert (out[:, :, 0] == 0).all() and (out[:, :, 1] != 0).all()
    for tensor in (q, k, v):
        kept = tensor.clone()
        tensor[1, 2, 1] = torch.nan
        out = posenc.attention(q, k, v, **options, mask=masks.causal, impl="few_queries")
        assert out[1, 2, 1].isnan().all() and out[0].isfinite().all()
        tensor.copy_(kept)


@torch.no_grad()
def test_any_number_of_threads_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(few_queries, "SHARED", 0)
    tensors, encoding, options = given("t5", 1, 300, torch.float32)
    before, found = torch.get_num_threads(), []
    for count in (1, 3):
        torch.set_num_threads(count)
        try:
            found.append(posenc.attention(*tensors, encoding, **options, mask=masks.causal))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


def test_what_it_does_not_do_it_refuses_and_auto_takes_another():
    tensors, _, options = given("nope", 1, 40, torch.float32)
    three, _, other = given("nope", 3, 40, torch.float32)
    q, k, v = tensors
    cases = {
        "2 queries at most, and these are 3": (three, other),
        "float32 and bfloat16": ([t.half() for t in tensors], options),
        "no gradients": ((q.clone().requires_grad_(), k, v), options),
        "which this kernel does not show": (tensors, options | {"encoding": posenc.Shaw(32)}),
    }
    for reason, (given_tensors, call) in cases.items():
        with torch.set_grad_enabled(reason == "no gradients"):
            with pytest.raises(ValueError, match=reason):
                posenc.attention(*given_tensors, **call, mask=masks.causal, impl="few_queries")
            plan = posenc.explain(*given_tensors, **call, mask=masks.causal)
            assert plan.impl != "few_queries"
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():  # which rounds keys and values
        assert posenc.explain(*tensors, **options, mask=masks.causal).impl == "sdpa"
        with pytest.raises(ValueError, match="in the dtype of queries"):
            posenc.attention(*tensors, **options, mask=masks.causal, impl="few_queries")
    with torch.no_grad():
        assert posenc.explain(*tensors, **options, mask=masks.causal).impl == "few_queries"


@torch.no_grad()
def test_without_a_compiler_torch_does_it(monkeypatch):
    monkeypatch.setenv("POSENC_NATIVE", "0")
    native.load.cache_clear()
    tensors, encoding, options = given("t5", 1, 40, torch.float32)
    with pytest.raises(ValueError, match="no C compiler here"):
        posenc.attention(*tensors, encoding, **options, mask=masks.causal, impl="few_queries")
    got = posenc.attention(*tensors, encoding, **options, mask=masks.causal)
    native.load.cache_clear()
    monkeypatch.delenv("POSENC_NATIVE")
    want = posenc.attention(*tensors, encoding, **options, mask=masks.causal, impl="few_queries")
    torch.testing.assert_close(got, want, rtol=3e-6, atol=3e-6)
    native.load.cache_clear()


@torch.no_grad()
def test_no_memory_is_an_error_that_says_so(monkeypatch):
    class Full:
        attend_f32 = without_memory("attend_f32")

    tensors, _, options = given("nope", 1, 40, torch.float32)
    monkeypatch.setattr(few_queries, "_library", lambda: Full)
    with pytest.raises(MemoryError, match="attend_f32: no memory"):
        posenc.attention(*tensors, **options, mask=masks.causal)


def one_query(q, k, v):
    where = {"q_positions": torch.tensor([39]), "kv_positions": torch.arange(40)}
    return posenc.attention(q, k, v, **where)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_holds_what_was_computed_and_not_its_result():
    first, second = ([torch.randn(1, 2, n, 16) for n in (1, 40, 40)] for _ in range(2))
    traced = torch.jit.trace(one_query, first, check_trace=False)
    torch.testing.assert_close(traced(*second), one_query(*second))


def test_another_kind_of_tensor_goes_elsewhere():
    class Named(torch.Tensor):
        pass

    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, 40, 40))
    where = {"q_positions": torch.tensor([39]), "kv_positions": torch.arange(40)}
    assert posenc.explain(q, k, v, **where).impl == "few_queries"
    assert posenc.explain(q.as_subclass(Named), k, v, **where).impl != "few_queries"
