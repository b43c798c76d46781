"""Attention in bfloat16 by one pass of C over each head: what float32 gives, rounded."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.kernels import by_head

HEADS, KV_HEADS, BATCH = 4, 2, 2
pytestmark = pytest.mark.skipif(
    by_head.compiled() is None,
    reason="no C compiler here, or a processor without bfloat16 in vectors, or with tiles of it",
)
EPS = torch.finfo(torch.bfloat16).eps


def given(name, q_len, kv_len, *, width=32, v_width=32, spread=1.0):
    """Tokens of any strides, as projections give them, and the options of the call."""
    torch.manual_seed(q_len + kv_len)
    shape = posenc.ModelShape(HEADS * width, HEADS, train_length=64)
    encoding = posenc.create(name, shape).for_layer(0)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    kv_positions = torch.arange(kv_len)
    q_positions = kv_positions[kv_len - q_len :]
    sizes = (HEADS, q_len, width), (KV_HEADS, kv_len, width), (KV_HEADS, kv_len, v_width)
    q, k, v = (torch.randn(BATCH, n, h, w).bfloat16().transpose(1, 2) for h, n, w in sizes)
    with torch.no_grad():
        state = encoding.state(torch.randn(BATCH, kv_len, HEADS * width), kv_positions)
    q_state = None if state is None else state[:, :, kv_len - q_len :]
    options = {"q_positions": q_positions, "kv_positions": kv_positions}
    states = {"q_state": q_state, "kv_state": state}
    return (q * spread, k, v), encoding, options | states


@torch.no_grad()
def compare(tensors, encoding, options, mask, bound=4 * EPS):
    got, lse = posenc.attention(
        *tensors, encoding, **options, mask=mask, return_lse=True, impl="by_head"
    )
    want, want_lse = posenc.attention(
        *(t.float() for t in tensors), encoding, **options, mask=mask, return_lse=True,
        impl="reference",
    )  # fmt: skip
    assert got.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(got.float(), want, rtol=0, atol=bound)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-2)
    alone = posenc.attention(*tensors, encoding, **options, mask=mask, impl="by_head")
    assert torch.equal(alone, got)


MASKS = {
    "causal": masks.causal,
    "everything": None,
    "window": masks.causal & masks.sliding_window(40),
    "window both ways": masks.sliding_window(7),
}
NAMES = ("nope", "rope", "alibi", "t5", "kerple", "sandwich")


@pytest.mark.parametrize(("q_len", "kv_len"), [(9, 9), (33, 33), (64, 97), (300, 300), (40, 700)])
@pytest.mark.parametrize("which", MASKS)
@pytest.mark.parametrize("name", NAMES)
def test_it_gives_what_float32_gives(name, which, q_len, kv_len):
    compare(*given(name, q_len, kv_len), MASKS[which])


@pytest.mark.parametrize(("width", "v_width"), [(16, 16), (34, 6), (64, 96), (128, 128)])
def test_any_width(width, v_width):
    compare(*given("alibi", 70, 70, width=width, v_width=v_width), masks.causal)


@pytest.mark.parametrize("length", [9, 200, 1024])
def test_a_number_for_each_key(length):
    compare(*given("fox", length, length), masks.causal)


@torch.no_grad()
def test_a_long_row_and_keys_too_far_for_a_weight():
    """ALiBi's steep heads read near keys alone; T5 reads all 2,500."""
    for name in ("alibi", "t5"):
        compare(*given(name, 2500, 2500), masks.causal)


@torch.no_grad()
def test_keys_before_a_window_are_not_read(monkeypatch):
    seen, own = [], by_head._forward
    monkeypatch.setattr(by_head, "_forward", lambda *a: seen.append(a[5]) or own(*a))
    tensors, encoding, options = given("rope", 300, 300)
    for mask in (masks.causal, masks.causal & masks.sliding_window(40)):
        posenc.attention(*tensors, encoding, **options, mask=mask, impl="by_head")
    assert seen[0] is None
    assert seen[1].tolist() == [300 - 40] * HEADS  # the first key of the last query


def test_sharp_weights():
    compare(*given("alibi", 100, 100, spread=30.0), masks.causal, bound=8 * EPS)


@torch.no_grad()
def test_under_autocast_float32_is_rounded_first():
    tensors, encoding, options = given("t5", 80, 80)
    wide = [t.float() for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        assert posenc.explain(*wide, encoding, **options, mask=masks.causal).impl == "by_head"
        got = posenc.attention(*wide, encoding, **options, mask=masks.causal)
    assert got.dtype == torch.float32
    want = posenc.attention(*tensors, encoding, **options, mask=masks.causal)
    assert torch.equal(got, want.float())


@torch.no_grad()
def test_a_row_that_sees_no_key_gives_zeros_and_no_log_sum_exp():
    q, k, v = given("nope", 40, 40)[0]
    where = {"q_positions": torch.arange(40), "kv_positions": torch.arange(20, 60)}
    out, lse = posenc.attention(
        q, k, v, **where, mask=masks.causal, return_lse=True, impl="by_head"
    )
    assert (out[:, :, :20] == 0).all() and (lse[:, :, :20] == -torch.inf).all()
    assert (out[:, :, 20:] != 0).all() and lse[:, :, 20:].isfinite().all()


@torch.no_grad()
def test_a_nan_stays_in_its_row_and_a_hidden_key_reaches_no_row():
    (q, k, v), encoding, options = given("alibi", 100, 100)
    clean = posenc.attention(q, k, v, encoding, **options, mask=masks.causal, impl="by_head")
    q[1, 2, 60] = torch.nan
    out = posenc.attention(q, k, v, encoding, **options, mask=masks.causal, impl="by_head")
    assert out[1, 2, 60].isnan().all() and out.isnan().sum() == out.shape[-1]
    q[1, 2, 60] = 0
    k[:, :, 50] = torch.nan
    out = posenc.attention(q, k, v, encoding, **options, mask=masks.causal, impl="by_head")
    assert torch.equal(out[:, :, :50], clean[:, :, :50]) and out[:, :, 50:].isnan().all()
    mask = masks.causal & masks.sliding_window(5)
    out = posenc.attention(q, k, v, encoding, **options, mask=mask, impl="by_head")
    assert out[:, :, 55:].isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads):
    tensors, encoding, options = given("t5", 200, 200)
    before, found = torch.get_num_threads(), []
    for count in (1, threads):
        torch.set_num_threads(count)
        try:
            found.append(
                posenc.attention(*tensors, encoding, **options, mask=masks.causal, impl="by_head")
            )
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["fire", "shaw", "transformer_xl", "deberta"])
@torch.no_grad()
def test_blocks_of_written_numbers_use_it(name, monkeypatch):
    tensors, encoding, options = given(name, 300, 300)
    calls, own = [], by_head.attend_with
    monkeypatch.setattr(by_head, "attend_with", lambda *a: calls.append(a) or own(*a))
    got = posenc.attention(*tensors, encoding, **options, mask=masks.causal, impl="blockwise")
    assert calls
    want = posenc.attention(
        *(t.float() for t in tensors), encoding, **options, mask=masks.causal, impl="reference"
    )
    torch.testing.assert_close(got.float(), want, rtol=0, atol=6 * EPS)


NOBODY = {
    "later than all queries": (40, 64, masks.causal, slice(50, 64)),
    "before every window": (90, 100, masks.causal & masks.sliding_window(20), slice(0, 71)),
    "outside a window both ways": (50, 200, masks.sliding_window(9), slice(68, 200)),
}


@pytest.mark.parametrize("name", ["nope", "alibi"])
@pytest.mark.parametrize("which", NOBODY)
@torch.no_grad()
def test_what_nobody_sees_may_hold_anything(which, name):
    start, keys, mask, unseen = NOBODY[which]
    (q, k, v), encoding, _ = given(name, 10, keys)
    where = {"q_positions": torch.arange(start, start + 10), "kv_positions": torch.arange(keys)}
    want = posenc.attention(
        *(t.float() for t in (q, k, v)), encoding, **where, mask=mask, impl="reference"
    )
    k[:, :, unseen], v[:, :, unseen] = torch.nan, torch.inf
    got = posenc.attention(q, k, v, encoding, **where, mask=mask, impl="by_head")
    torch.testing.assert_close(got.float(), want, rtol=0, atol=4 * EPS)
    blind = where | {"q_positions": torch.arange(-30, -20)}
    out = posenc.attention(q, v, v, encoding, **blind, mask=masks.causal, impl="by_head")
    assert (out == 0).all()


@torch.no_grad()
def test_a_gate_far_from_the_first_token_is_as_exact():
    tensors, encoding, options = given("fox", 300, 300)
    far = options | {n: options[n] - 69_000 for n in ("q_state", "kv_state")}
    near, moved = (
        posenc.attention(*tensors, encoding, **o, mask=masks.causal, impl="by_head")
        for o in (options, far)
    )
    torch.testing.assert_close(moved.float(), near.float(), rtol=0, atol=EPS)


@torch.no_grad()
def test_a_window_both_ways_reads_no_key_after_it(monkeypatch):
    seen, own = [], by_head._forward
    monkeypatch.setattr(by_head, "_forward", lambda *a: seen.append(a[-1]) or own(*a))
    tensors, encoding, options = given("rope", 300, 300)
    posenc.attention(*tensors, encoding, **options, mask=masks.sliding_window(7), impl="by_head")
    assert seen == [6]


@torch.no_grad()
def test_numbers_written_in_any_order():
    """A copy of the bias must live as long as C reads it: here it has the size of the output."""
    q, k, v = torch.randn(3, 1, 4, 256, 512).bfloat16()
    bias = torch.randn(1, 4, 256, 256).mT
    want, want_lse = by_head.attend_with(q, k, v, bias.contiguous(), 0.1)
    got, lse = by_head.attend_with(q, k, v, bias, 0.1)
    assert torch.equal(got, want) and torch.equal(lse, want_lse)


def test_what_it_does_not_do_it_refuses_and_auto_takes_another():
    (q, k, v), _, options = given("nope", 40, 40)
    valid = torch.ones(BATCH, 40, dtype=torch.int64)
    valid[1, :3] = 0
    wide = [t.float() for t in (q, k, v)]
    long, _, at = given("nope", 9, by_head.MOST + 1)
    few = {n: t[:, :, -8:] if n == "q" else t for n, t in (("q", q), ("k", k), ("v", v))}
    cases = {
        "computes in bfloat16": (wide, {}),
        "no gradients": ([q.clone().requires_grad_(), k, v], {}),
        "memory grows": (long, at),
        "dropout": ([q, k, v], {"dropout_p": 0.1}),
        "bound by memory": (
            [*few.values()], {"q_positions": options["q_positions"][-8:]}
        ),
        "more than causality": ([q, k, v], {"mask": masks.causal & masks.padding(valid)}),
        "not known to be consecutive": ([q, k, v], {"kv_positions": torch.arange(40) * 2}),
        "which these kernels do not show": ([q, k, v], {"encoding": posenc.CoPE(32)}),
    }  # fmt: skip
    for reason, (tensors, other) in cases.items():
        call = {"mask": masks.causal, **options, **other}
        with torch.set_grad_enabled(reason == "no gradients"):
            with pytest.raises(ValueError, match=reason):
                posenc.attention(*tensors, **call, impl="by_head")
            assert posenc.explain(*tensors, **call).impl != "by_head", reason
    with torch.no_grad():
        assert posenc.explain(q, k, v, **options, mask=masks.causal).impl == "by_head"


@torch.no_grad()
def test_without_the_library_it_refuses(monkeypatch):
    monkeypatch.setattr(by_head, "compiled", lambda: None)
    (q, k, v), _, options = given("nope", 40, 40)
    with pytest.raises(ValueError, match="no compiler here, or a processor without"):
        posenc.attention(q, k, v, **options, mask=masks.causal, impl="by_head")
    assert posenc.explain(q, k, v, **options, mask=masks.causal).impl == "sdpa"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where it loads its rules
def test_forward_mode_is_not_lost(monkeypatch):
    """Blocks of written numbers: C would return a result without a tangent, as if it were zero."""
    tensors, encoding, options = given("fire", 300, 300)
    calls = []
    monkeypatch.setattr(by_head, "attend_with", lambda *a: calls.append(a))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0]))
        try:
            posenc.attention(
                dual, *tensors[1:], encoding, **options, mask=masks.causal, impl="blockwise"
            )
        except NotImplementedError:
            pass  # torch's kernel has no derivative of this kind, and says so
    assert not calls
