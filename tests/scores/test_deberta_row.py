"""DeBERTa with one query: the far vector in the query and near keys in C, against torch alone."""

import math

import pytest
import torch

import posenc
from posenc import DeBERTa, KVCache, attention, masks
from posenc.numbers import native
from posenc.scores import deberta_row
from posenc.terms.tokens import Tokens

FUNCTION = (deberta_row.FUNCTION,)
needs_c = pytest.mark.skipif(
    native.load(deberta_row.SOURCE, FUNCTION) is None, reason="no C compiler, or POSENC_NATIVE=0"
)
pytestmark = needs_c


def made(kv_len=70, *, kv_heads=4, batch=2, dtype=torch.float32, **options):
    torch.manual_seed(0)
    encoding = DeBERTa(32, 4, max_distance=8, **options).to(dtype).eval()
    torch.nn.init.normal_(encoding.table)  # as large as what it is added to
    q = torch.randn(batch, 4, 1, 8, dtype=dtype)
    k, v = torch.randn(2, batch, kv_heads, kv_len, 8, dtype=dtype)
    at = {"q_positions": torch.tensor([kv_len - 1]), "kv_positions": torch.arange(kv_len)}
    return encoding, (q, k, v), at


def attended(monkeypatch, encoding, given, at, *, folded=True, **options):
    """The output, and how many times the term was folded."""
    count, fold = [], deberta_row.OneQuery._folded

    def counted(self, scale):
        count.append(scale)
        return fold(self, scale)

    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(deberta_row.OneQuery, "_folded", counted)
        if not folded:
            patch.setattr(deberta_row.native, "load", lambda *given: None)
        return attention(*given, encoding, **at, **options), len(count)


OPTIONS = [
    {}, {"p2c": True, "c2p": False}, {"paper_p2c": True}, {"layer_norm": True}, {"num_buckets": 6},
    {"num_buckets": 6, "paper_p2c": True, "layer_norm": True},
]  # fmt: skip


PLACES = [(70, 69), (1, 0), (5, 4), (70, 30), (70, 500), (9, -4)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("kv_len", "query"), [(70, 69), (1, 0), (5, 4), (70, 30), (70, 500), (9, -4)]
)
def test_it_is_the_same_as_without_c(options, kv_len, query, monkeypatch):
    encoding, given, at = made(kv_len, **options)
    at["q_positions"] = torch.tensor([query])
    ours, folded = attended(monkeypatch, encoding, given, at)
    plain, none = attended(monkeypatch, encoding, given, at, folded=False)
    assert (folded, none) == (1, 0)
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)
    exact, _ = attended(
        monkeypatch, encoding.double(), [t.double() for t in given], at, impl="reference"
    )
    torch.testing.assert_close(ours, exact.float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_masks_groups_strides_and_threads(threads, monkeypatch):
    encoding, (q, k, v), at = made(kv_heads=2)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # as projections leave them
    hidden = masks.causal & masks.sliding_window(20)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for mask in (None, masks.causal, hidden):
            ours, folded = attended(monkeypatch, encoding, (q, k, v), at, mask=mask)
            plain, _ = attended(monkeypatch, encoding, (q, k, v), at, mask=mask, folded=False)
            assert folded == 1
            torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_a_key_that_is_hidden_may_hold_anything(monkeypatch):
    encoding, (q, k, v), at = made()
    mask = masks.sliding_window(20) & masks.causal
    clean, _ = attended(monkeypatch, encoding, (q, k, v), at, mask=mask)
    k, v = k.clone(), v.clone()
    k[:, :, :30], v[:, :, 10] = math.nan, math.inf
    dirty, folded = attended(
        monkeypatch, encoding, (q, k, v), at, mask=masks.sliding_window(20) & masks.causal
    )
    assert folded == 1 and torch.equal(clean, dirty)


def test_keys_that_place_two_turned_are_not_what_the_term_means(monkeypatch):
    """A sum with a rotation: the kernel's keys are not those of the term."""
    shape = posenc.ModelShape(32, 4, train_length=16)
    encoding = posenc.create("rope+deberta", shape).eval()
    _, given, at = made()
    ours, folded = attended(monkeypatch, encoding, given, at)
    exact, _ = attended(monkeypatch, encoding, given, at, impl="reference")
    assert folded == 0
    torch.testing.assert_close(ours, exact, atol=2e-6, rtol=1e-5)


def test_where_products_are_rounded_the_query_is_left_alone(monkeypatch):
    encoding, given, at = made()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, folded = attended(monkeypatch, encoding, given, at)
    assert folded == 0
    halves = [t.bfloat16() for t in given]
    assert attended(monkeypatch, encoding, halves, at)[1] == 0
    assert attended(monkeypatch, encoding.double(), [t.double() for t in given], at)[1] == 0


def test_keys_whose_numbers_lie_apart_and_one_part_alone_are_left_to_torch(monkeypatch):
    encoding, (q, k, v), at = made()
    apart = k.mT.contiguous().mT
    ours, folded = attended(monkeypatch, encoding, (q, apart, v), at)
    plain, _ = attended(monkeypatch, encoding, (q, k, v), at, folded=False)
    assert folded == 0
    torch.testing.assert_close(ours, plain, atol=2e-6, rtol=1e-5)
    encoding, _, at = made(p2c=False)
    with torch.no_grad():  # the keys may be there for another part of a sum
        term = encoding.term(Tokens(q, at["q_positions"]), Tokens(k, at["kv_positions"]))
    assert term.fold is None


def test_the_term_itself_stays_whole():
    """Who asks the term for its numbers gets all of them, whatever a kernel folds."""
    encoding, (q, k, _), at = made()
    with torch.no_grad():
        term = encoding.term(Tokens(q, at["q_positions"]), Tokens(k, at["kv_positions"]))
        whole = term.values(slice(0, 1), slice(0, 70))
        scale = encoding.scale(8) * 3  # of other products
        added, bias = term.fold(scale)
    torch.testing.assert_close(scale * added @ k.mT + bias, whole, atol=2e-6, rtol=1e-5)
    assert not torch.allclose(bias, whole, atol=1e-2)


def test_decoding_with_a_cache_folds_and_is_prefill(monkeypatch):
    encoding, (_, k, v), _ = made(24, batch=1)
    q, positions = torch.randn(1, 4, 24, 8), torch.arange(24)
    at = {"q_positions": positions, "kv_positions": positions}
    whole, _ = attended(monkeypatch, encoding, (q, k, v), at, mask=masks.causal)
    cache, found = KVCache(), []
    for i in range(24):
        at = {"q_positions": positions[i : i + 1], "kv_positions": positions[i : i + 1]}
        row = slice(i, i + 1)
        given = q[:, :, row], k[:, :, row], v[:, :, row]
        out, folded = attended(monkeypatch, encoding, given, at, mask=masks.causal, cache=cache)
        assert folded == 1
        found.append(out)
    torch.testing.assert_close(torch.cat(found, 2), whole, atol=2e-6, rtol=1e-5)
