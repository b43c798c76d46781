"""One query or a few: fast paths that must give the last rows of the whole attention."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend import choose
from posenc.attend.attention import explain
from posenc.attend.problem import Problem
from posenc.attend.problem_builder import build_problems
from posenc.attend.ways import blocks, flash
from posenc.encodings.base.term import Tokens
from tests.attend import test_flex
from tests.attending import attend

HEADS, WIDTH, LENGTH = 4, 8, 300


def whole(name: str, **options):
    torch.manual_seed(0)
    shape = posenc.ModelShape(HEADS * WIDTH, HEADS, train_length=128)
    encoding = posenc.create(name, shape, **options).for_layer(0).double()
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    q, k, v = (torch.randn(2, HEADS, LENGTH, WIDTH, dtype=torch.float64) for _ in range(3))
    state = encoding.state(torch.randn(2, LENGTH, HEADS * WIDTH, dtype=torch.float64), POSITIONS)
    return encoding, q, k, v, state


POSITIONS = torch.arange(LENGTH)
CASES = [
    ("nope", {}),
    ("rope", {}),
    ("alibi", {}),
    ("t5", {}),
    ("fire", {}),
    ("fox", {}),
    ("cope", {}),
    ("shaw", {}),
    ("transformer_xl", {}),
    ("transformer_xl", {"clamp_len": 40}),
    ("deberta", {}),
    ("deberta", {"max_distance": 40}),
    ("deberta", {"max_distance": 40, "paper_p2c": True}),
    ("deberta", {"max_distance": 90, "num_buckets": 16, "layer_norm": True}),
    ("deberta", {"max_distance": 40, "p2c": False}),
    ("deberta", {"c2p": False}),
]


@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("window", [None, 70])
def test_the_last_rows_are_those_of_the_whole(name, options, count, window):
    encoding, q, k, v, state = whole(name, **options)
    mask = masks.causal if window is None else masks.causal & masks.sliding_window(window)

    def rows(last: int) -> torch.Tensor:
        return attend(q[:, :, -last:], k, v, encoding, POSITIONS, mask, state)

    want = rows(LENGTH)[:, :, -count:]
    torch.testing.assert_close(rows(count), want, rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # what is kept from call to call, too
        for _ in range(2):
            torch.testing.assert_close(rows(count), want, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kv_positions", [POSITIONS.flip(0), POSITIONS * 3 % 101, POSITIONS - 150])
@pytest.mark.parametrize("name", ["deberta", "transformer_xl", "t5"])
def test_one_query_stands_anywhere_among_its_keys(name, kv_positions):
    encoding, q, k, v, _ = whole(name, **({"max_distance": 40} if name == "deberta" else {}))
    for position in (0, 60, 500):
        at = {"q_positions": torch.tensor([position]), "kv_positions": kv_positions}
        with torch.enable_grad():
            want = posenc.attention(q[:, :, :1], k, v, encoding, **at, impl="reference")
        torch.testing.assert_close(
            posenc.attention(q[:, :, :1], k, v, encoding, **at), want, rtol=1e-9, atol=1e-9
        )


@torch.no_grad()
@pytest.mark.parametrize("name", ["deberta", "fire", "fox", "t5"])
def test_autocast_rounds_no_row_of_bias(name, monkeypatch):
    encoding, q, k, v, state = (None if t is None else t.float() for t in whole(name))
    last = {"q_positions": POSITIONS[-1:], "kv_positions": POSITIONS, "kv_state": state}
    last["q_state"] = None if state is None else state[:, :, -1:]
    rows, plain = [], flash.attend

    def spy(q, k, v, bias, *args):
        rows.append(bias)
        return plain(q, k, v, bias, *args)

    monkeypatch.setattr(flash, "attend", spy)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            posenc.attention(q[:, :, -1:], k, v, encoding, mask=masks.causal, **last)
    assert torch.equal(*rows)


def problem(q_positions, mask, first_key: int = 0) -> Problem:
    q, k = torch.randn(1, 1, len(q_positions), 4), torch.randn(1, 1, 20, 4)
    found = build_problems(
        q,
        k,
        k,
        None,
        q_positions=q_positions,
        kv_positions=torch.arange(20),
        q_state=None,
        kv_state=None,
        mask=mask,
        cache=None,
        dropout_p=0.0,
        return_lse=False,
    )
    (found,) = found
    return found.restricted_to_keys(first_key, 20)


@pytest.mark.parametrize("first, last", [(0, 20), (4, 8), (4, 20), (6, 7), (0, 8)])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_keys_that_may_be_visible_are_counted_among_those_of_the_problem(first, last, window):
    mask = masks.causal & masks.sliding_window(window)
    whole = problem(torch.arange(20), mask)
    some = whole.restricted_to_keys(first, last)
    for start, stop in ((6, 8), (5, 6), (0, 20)):
        begin, end = some.keys_maybe_visible(start, stop)
        visible = whole.visibility_mask(start, stop)[0, 0, :, first:last].any(0).nonzero().flatten()
        if len(visible):
            assert (begin, end) == (int(visible[0]), int(visible[-1]) + 1)
        else:
            assert 0 <= begin < end <= last - first


def test_a_mask_that_hides_nothing_is_not_written_out():
    last, early = torch.tensor([19]), torch.tensor([18])
    window = masks.causal & masks.sliding_window(8)
    assert problem(last, masks.causal).visibility_mask(0, 1) is None
    assert problem(early, masks.causal).visibility_mask(0, 1) is not None
    assert problem(last, window).visibility_mask(0, 1) is not None
    assert problem(last, window, first_key=12).visibility_mask(0, 1) is None
    assert problem(last, window, first_key=11).visibility_mask(0, 1) is not None
    hidden = torch.ones(1, 20, dtype=torch.bool)
    hidden[0, 3] = False
    assert problem(last, masks.causal & masks.padding(hidden)).visibility_mask(0, 1) is not None


@torch.no_grad()
def test_states_are_one_row_of_bias_for_a_few_queries():
    encoding, q, k, v, state = whole("fox")
    for count, few in ((1, True), (8, True), (9, False)):
        plan = explain(
            q[:, :, -count:],
            k,
            v,
            encoding,
            q_positions=POSITIONS[-count:],
            kv_positions=POSITIONS,
            q_state=state[:, :, -count:],
            kv_state=state,
            mask=masks.causal,
        )
        assert ("few queries" in plan.reason) == few


def turned(rope: posenc.RoPE, positions: torch.Tensor | range) -> torch.Tensor:
    ones = torch.ones(1, 1, len(positions), WIDTH)
    return rope.transform(Tokens(ones, positions), Tokens(ones, positions))[0]


@pytest.mark.parametrize("kind", [torch.arange, range])
def test_tables_are_kept_by_what_prepare_returns_only(kind, monkeypatch):
    rope, calls = posenc.RoPE(WIDTH, interleaved=False), []
    made = type(rope)._compute_cos_sin
    monkeypatch.setattr(
        type(rope), "_compute_cos_sin", lambda self, *given: calls.append(1) or made(self, *given)
    )
    first = turned(rope, kind(30))
    assert torch.equal(turned(rope, kind(30)), first) and len(calls) == 2
    prepared = rope.prepare(kind(30))
    for _ in range(3):
        assert torch.equal(turned(prepared, torch.arange(30)), first)
    assert len(calls) <= 4
    later = torch.arange(30) * 2 + 5
    assert torch.equal(turned(prepared, later), turned(rope, later))


def test_prepared_positions_that_are_changed_in_place_are_noticed():
    rope, positions = posenc.RoPE(WIDTH, interleaved=False), torch.arange(30) * 2
    prepared = rope.prepare(positions)
    positions += 5
    assert torch.equal(turned(prepared, positions), turned(rope, positions))


def test_tables_of_inference_mode_are_not_kept_for_training():
    rope = posenc.RoPE(WIDTH, interleaved=False).prepare(range(6))
    with torch.inference_mode():
        turned(rope, range(6))
    x = torch.randn(1, 1, 6, WIDTH, requires_grad=True)
    rope.transform(Tokens(x, range(6)), Tokens(x, range(6)))[0].sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", ["rope", "dynamic_ntk", "rerope", "self_extend", "dual_chunk"])
def test_what_is_prepared_in_inference_mode_serves_training(name):
    encoding = posenc.create(name, posenc.ModelShape(4 * WIDTH, 4, train_length=4))
    positions = torch.arange(9)
    with torch.inference_mode():
        prepared = encoding.prepare(positions)
    q = torch.randn(1, 4, 9, WIDTH, requires_grad=True)
    where = {"q_positions": positions, "kv_positions": positions, "mask": masks.causal}
    out = posenc.attention(q, q, q, encoding, prepared=prepared, **where)
    assert torch.equal(out, posenc.attention(q, q, q, encoding, **where))
    out.sum().backward()
    assert q.grad is not None


def test_few_tokens_are_turned_as_many_are():
    rope, x = posenc.RoPE(64, interleaved=False), torch.randn(1, 40, 200, 64)
    positions = torch.arange(200)
    q, k = rope.transform(Tokens(x[:, :32], positions), Tokens(x[:, 32:], positions))
    one = positions[150:151]
    few_q, few_k = rope.transform(Tokens(x[:, :32, 150:151], one), Tokens(x[:, 32:, 150:151], one))
    torch.testing.assert_close(few_q, q[:, :, 150:151])
    torch.testing.assert_close(few_k, k[:, :, 150:151])


HIDDEN = (
    masks.causal
    & masks.sliding_window(2)
    & masks.padding(torch.arange(LENGTH) < torch.tensor([[LENGTH - 2], [LENGTH]]))
)
"""Mask under which the last query of the first row of the batch sees nothing; the queries before it
see keys."""


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("kernel", ["CPU's", "any device's"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["alibi", "t5", "fire", "fox"])
@torch.no_grad()
def test_a_row_of_bias_serves_grouped_heads_half_types_and_rows_that_see_nothing(
    name, dtype, kernel, monkeypatch
):
    """Handed over as a mask, against the scores written out in float64."""
    encoding, q, k, v, state = whole(name)
    k, v = k[:, ::2], v[:, ::2]
    rows = {"q_positions": POSITIONS[-3:], "kv_positions": POSITIONS, "mask": HIDDEN}
    if state is not None:
        rows |= {"q_state": state[:, :, -3:], "kv_state": state}
    want = posenc.attention(
        *(t.to(dtype).double() for t in (q[:, :, -3:], k, v)), encoding, impl="reference", **rows
    )
    few = [t.to(dtype) for t in (q[:, :, -3:], k, v)]
    assert "few queries" in explain(*few, encoding, **rows).reason
    got = by_rows_anywhere(*few, encoding, monkeypatch, **rows)
    if kernel == "CPU's":
        got = posenc.attention(*few, encoding, **rows)
    assert isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)
    assert not got[0, :, 2].any() and got[0, :, :2].any() and got[1, :, 2].any()
    bound = 4 * torch.finfo(dtype).eps * v.abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=bound)


def by_rows_anywhere(q, k, v, encoding, monkeypatch, **options):
    """Return the output of attention for a few queries, computed as on a GPU, where torch's kernel
    reads a bias in the dtype of q."""
    (built,) = build_problems(q, k, v, encoding, **options)
    with monkeypatch.context() as patch:
        patch.setattr(flash, "runs_on", lambda device: False)
        return blocks.attend_with_bias_mask(built.with_prepared_term(built.q_len), 0, built.q_len)[
            0
        ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["large", "far", "hidden by the bias", "wide values"])
@torch.no_grad()
def test_a_row_of_bias_in_few_bits_is_as_exact_as_the_dtype(case, dtype, monkeypatch):
    """Of 256 channels Sandwich adds 128 at distance 0. At distance 10**7 ALiBi's is beyond the
    numbers of float16, for all keys."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16).to(dtype) for h, n in ((4, 2), (2, 300), (2, 300)))
    where = {"q_positions": range(298, 300), "kv_positions": range(300), "mask": masks.causal}
    encoding = posenc.ALiBi(4)
    if case == "large":
        encoding = posenc.Sandwich(4, dim=256)
    if case == "far":
        where["q_positions"] = range(10**7, 10**7 + 2)
    if case == "hidden by the bias":
        encoding, where["q_positions"] = Hiding(), range(20, 22)
    if case == "wide values":
        v = torch.randn(2, 2, 300, 24).to(dtype)
    want = posenc.attention(q.double(), k.double(), v.double(), encoding, impl="reference", **where)
    got = by_rows_anywhere(q, k, v, encoding, monkeypatch, **where)
    # twice the rounding of the weights and of the output
    torch.testing.assert_close(got.double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)


@torch.no_grad()
def test_a_kernel_that_returns_nan_for_a_query_without_a_key_gets_no_nan_itself(monkeypatch):
    """As torch's kernels for GPUs may, and as the softmax of -inf alone is. The CPU's gives 0."""
    given = []

    def plain(q, k, v, attn_mask, scale, enable_gqa):
        given.append(attn_mask)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ k.mT).double() * scale + attn_mask.double()
        return (scores.softmax(-1) @ v.double()).to(q.dtype)

    encoding, q, k, v, _ = whole("alibi")
    q, k, v = q[:, :, -3:].float(), k[:, ::2].float(), v[:, ::2].float()
    rows = {"q_positions": POSITIONS[-3:], "kv_positions": POSITIONS, "mask": HIDDEN}
    want = posenc.attention(q.double(), k.double(), v.double(), encoding, impl="reference", **rows)
    monkeypatch.setattr(flash.F, "scaled_dot_product_attention", plain)
    got = by_rows_anywhere(q, k, v, encoding, monkeypatch, **rows)
    assert not given[0].isnan().any() and given[0][0, :, 2].isneginf().all()
    assert not got[0, :, 2].any(), "0 by the contract"
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6)


class Hiding(posenc.DistanceBias):
    """A bias that hides all keys of position 20's query, and one key of that of 21."""

    claims = posenc.Claims(places=(3,), source="a test")

    def bias(self, distance):
        shown = (distance == 21) | (distance == 3)
        return (-distance.double()).masked_fill(~shown, -torch.inf)[None].expand(4, -1, -1)


def test_a_gpu_runs_a_few_queries_with_a_row_of_bias():
    for name, form in (("alibi", "row"), ("t5", "row"), ("deberta", "row"), ("cope", "")):
        built = test_flex.on_cuda(test_flex.problem(name, masks.causal, q_len=1, kv_len=2000))
        assert choose.sdpa_form(built)[0] == form
        assert (choose.choose(built).form == "row") == (form == "row")
    for options in ({"grad": True}, {"q_len": choose.FEW_QUERIES + 1}, {"return_lse": True}):
        built = test_flex.problem("t5", masks.causal, **{"q_len": 1, "kv_len": 2000} | options)
        assert choose.sdpa_form(test_flex.on_cuda(built))[0] == ""
    none = test_flex.on_cuda(test_flex.problem("t5", masks.causal, q_len=1, kv_len=0, q_at=0))
    assert choose.sdpa_form(none)[0] == "", "a softmax over nothing"
