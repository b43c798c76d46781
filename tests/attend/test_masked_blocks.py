"""Terms passed as masks to torch's kernel, against the reference in float64."""

import itertools
import types

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.ways import blocks
from posenc.encodings.base.term import PairwiseBias, Term
from tests.attend.test_flex import on_cuda, problem
from tests.attending import attend

HEADS, WIDTH, LENGTH = 4, 8, 150
NAMES = ("fire", "deberta", "transformer_xl", "inkling", "t5+fire", "shaw", "rope+shaw")
POSITIONS = {"run": torch.arange(LENGTH), "gaps": torch.arange(LENGTH) * 3}
PADDED = torch.ones(2, LENGTH, dtype=torch.bool)
PADDED[1, :70] = False
MASKS = {
    "causal": masks.causal,
    "all": None,
    "window": masks.causal & masks.sliding_window(9),
    "padding": masks.causal & masks.padding(PADDED),
}
CASES = [(name, mask) for name in NAMES for mask in MASKS if (name, mask) != ("inkling", "all")]
"""Inkling is for causal masks only."""
BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


def built(name: str) -> posenc.PositionEncoding:
    torch.manual_seed(0)
    shape = posenc.ModelShape(HEADS * WIDTH, HEADS, train_length=32)
    encoding = posenc.create(name, shape).for_layer(0)
    for parameter in encoding.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return encoding


def attended(encoding, q, k, v, positions, mask, impl: str, **options):
    x = torch.randn(2, LENGTH, HEADS * WIDTH, generator=torch.Generator().manual_seed(1))
    state = encoding.state(x.to(next(encoding.parameters()).dtype), positions)
    return attend(q, k, v, encoding, positions, mask=mask, state=state, impl=impl, **options)


@torch.no_grad()
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(("name", "mask"), CASES)
@pytest.mark.parametrize("where", POSITIONS)
def test_it_is_the_reference(name, where, mask, dtype, monkeypatch):
    ran = []
    monkeypatch.setattr(blocks, "rows_per_block", lambda call: 48)
    plain = blocks.attend_with_bias_mask
    monkeypatch.setattr(
        blocks, "attend_with_bias_mask", lambda *given: ran.append(1) or plain(*given)
    )
    encoding, positions = built(name), POSITIONS[where]
    q = torch.randn(2, HEADS, LENGTH, WIDTH).to(dtype)
    k, v = torch.randn(2, 2, 2, LENGTH, WIDTH).to(dtype)
    k, v = (k, v) if name != "deberta" else (t.repeat_interleave(2, 1) for t in (k, v))
    fused = "shaw" not in name
    if mask == "padding" and fused:  # what nobody sees may hold anything
        k[1, :, :70], v[1, :, :70] = torch.nan, torch.inf
    dtypes = encoding if dtype != torch.float64 else encoding.double()
    got = attended(dtypes, q, k, v, positions, MASKS[mask], "blocks", return_lse=True)
    assert bool(ran) == fused
    exact = (t.double().nan_to_num(0, 0, 0) for t in (q, k, v))
    want = attended(
        encoding.double(),
        *exact,
        positions=positions,
        mask=MASKS[mask],
        impl="reference",
        return_lse=True,
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=BOUND[dtype], atol=BOUND[dtype])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fire", "transformer_xl", "deberta"])
def test_under_autocast_products_are_rounded_and_what_is_added_is_not(name, dtype):
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, WIDTH).to(dtype)
    encoding, positions = built(name), POSITIONS["run"]
    with torch.autocast("cpu", torch.bfloat16):
        got = attended(encoding, q, k, v, positions, masks.causal, "auto")
        asked = attended(encoding, q, k, v, positions, masks.causal, "blocks")
    rounded = [t.bfloat16() for t in (q, k, v)]
    plain = attended(encoding, *rounded, positions, masks.causal, "blocks")
    assert got.dtype == dtype and torch.equal(got, asked)
    # The term sees the tokens as they came; all else is what rounded tokens give.
    torch.testing.assert_close(got.float(), plain.float(), rtol=2e-2, atol=2e-2)
    want = attended(
        built(name).double(), *(t.double() for t in (q, k, v)), positions, masks.causal, "reference"
    )
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("v_dim", [5, 12])
def test_values_of_another_width(v_dim, monkeypatch):
    monkeypatch.setattr(blocks, "rows_per_block", lambda call: 48)
    q, k = torch.randn(2, 2, HEADS, LENGTH, WIDTH)
    v = torch.randn(2, HEADS, LENGTH, v_dim)
    both = [
        attended(built("fire"), q, k, v, POSITIONS["run"], masks.causal, impl)
        for impl in ("blocks", "reference")
    ]
    torch.testing.assert_close(*both, rtol=2e-6, atol=2e-6)


@torch.no_grad()
@pytest.mark.parametrize("rows", [1, LENGTH])
def test_parts_of_one_projection_are_taken_whatever_their_strides(rows):
    """torch calls a tensor contiguous whatever the stride of an axis of one: a query whose heads
    lie inside its token, a batch of one out of a joint projection."""
    keys = POSITIONS["run"]
    for batch, apart in itertools.product((1, 2), (1, 2)):
        # Every second number of a whole one: one step from number to number, and not of one.
        _, k, v = torch.randn(batch, 3, HEADS, LENGTH, WIDTH * apart)[..., ::apart].unbind(1)
        q = torch.randn(batch, rows, HEADS, WIDTH * apart)[..., ::apart].transpose(1, 2)
        both = [attend(q, k, v, built("shaw"), keys, impl=impl) for impl in ("blocks", "reference")]
        torch.testing.assert_close(*both, rtol=2e-6, atol=2e-6)


class DoubledValues(PairwiseBias):
    """What an author may make of a term that only adds."""

    def add(self, scores, rows, keys, mask):
        return scores.mul_(2)


def test_a_term_of_ones_own_adds_only_where_it_says_so():
    assert PairwiseBias.additive and not DoubledValues.additive

    class Says(DoubledValues):
        additive = True

    class Inherits(Says):
        pass

    assert Says.additive and Inherits.additive


class Doubled(posenc.PositionEncoding):
    """A term that is no sum: what an author may write without saying so."""

    claims = posenc.Claims(places=(3,), source="a test, 2026")

    def term(self, q, k):
        class Twice(Term):
            def add(self, scores, rows, keys, mask):
                return scores.mul_(2)

        return Twice(q, k)


@torch.no_grad()
@pytest.mark.parametrize(
    "encoding",
    [
        Doubled(),
        posenc.RelativeLogits(HEADS * WIDTH, HEADS, log_scaling=(4, 0.5)),
        posenc.Compose(posenc.FIRE(HEADS), Doubled()),
    ],
    ids=["not said", "growing scores", "one of two"],
)
def test_what_changes_scores_otherwise_is_not_taken(encoding, monkeypatch):
    monkeypatch.setattr(blocks, "rows_per_block", lambda call: 48)
    monkeypatch.setattr(blocks, "attend_with_bias_mask", None)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, WIDTH)
    x = torch.randn(2, LENGTH, HEADS * WIDTH)
    state = encoding.state(x, POSITIONS["run"])
    both = [
        attend(q, k, v, encoding, POSITIONS["run"], state=state, impl=impl)
        for impl in ("blocks", "reference")
    ]
    torch.testing.assert_close(*both, rtol=2e-6, atol=2e-6)


class Stored(posenc.DistanceBias):
    """Add a bias that is a tensor of the encoding itself, not a new one."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(HEADS, LENGTH, LENGTH)

    def bias(self, distance):
        return self.table[:, : distance.shape[-2], : distance.shape[-1]]


@torch.no_grad()
def test_nothing_is_written_into_what_an_encoding_gives(monkeypatch):
    monkeypatch.setattr(blocks, "rows_per_block", lambda call: LENGTH)
    encoding, positions = Stored(), POSITIONS["gaps"]
    q, k, v = torch.randn(3, 1, HEADS, LENGTH, WIDTH)
    where = {"q_positions": positions, "kv_positions": positions, "mask": masks.causal}
    posenc.attention(q, k, v, encoding, impl="blocks", **where)
    assert not encoding.table.any()


def test_blocks_on_cuda_take_a_share_of_its_memory(monkeypatch):
    built = on_cuda(problem("cope", q_len=150, kv_len=2048), torch.float32)  # 64 KiB a query
    for memory, rows in ((80 * 2**30, 256), (2**27, 32), (2**20, 16)):
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device, memory=memory: types.SimpleNamespace(total_memory=memory),
        )
        assert blocks.rows_per_block(built) == rows


def test_a_block_has_as_much_for_each_thread_unless_it_is_traced(monkeypatch):
    built = problem("cope", q_len=150, kv_len=2048)  # 64 KiB a query, and at least 64 of them
    for threads, rows in ((1, 64), (2, 64), (4, 128), (8, 256), (64, 512)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert blocks.rows_per_block(built) == rows
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: pytest.fail("it cannot be traced"))
    assert blocks.rows_per_block(built) == 64
