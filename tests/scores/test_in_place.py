"""What C adds to the scores for CoPE and FIRE: the same as float64 in plain operations."""

from __future__ import annotations

import pytest
import torch

import posenc
from posenc import masks
from posenc.numbers import native
from posenc.scores import in_place

KERNELS = ("0", "1")
LENGTH, HEADS, WIDTH = 200, 4, 16


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setenv("POSENC_NATIVE", request.param)
    native.load.cache_clear()
    yield request.param
    native.load.cache_clear()


@pytest.fixture
def compiled():
    with torch.no_grad():
        if not in_place.applies(torch.zeros(1, 1, 1, 1)):
            pytest.skip("there is no C compiler")


def filled(name: str, spread: float = 0.5, **options) -> posenc.PositionEncoding:
    torch.manual_seed(0)
    shape = posenc.ModelShape(HEADS * WIDTH, HEADS, train_length=64)
    encoding = posenc.create(name, shape, **options).for_layer(0)
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter, std=spread)
    return encoding


def attended(encoding, impl, mask=masks.causal, dtype=torch.float32, q_positions=None):
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, HEADS, LENGTH, WIDTH).to(dtype) for _ in range(3))
    positions = torch.arange(LENGTH) if q_positions is None else q_positions
    state = v if getattr(encoding, "gates", "key") == "value" else None
    with torch.no_grad():
        out = posenc.attention(
            q, k, v, encoding.to(dtype), q_positions=positions, kv_positions=positions,
            kv_state=state, mask=mask, impl=impl,
        )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    return out


PADDED = masks.causal & masks.padding(torch.arange(LENGTH) < torch.tensor([[150], [LENGTH]]))
BY_HEAD = masks.causal & masks.Mask(lambda sight: sight.kv_idx % HEADS != sight.head)


@pytest.mark.parametrize(
    "mask", [masks.causal, PADDED, BY_HEAD, None], ids=["causal", "padded", "by-head", "none"]
)
@pytest.mark.parametrize("impl", ["reference", "blockwise"])
@pytest.mark.parametrize(
    "name, options",
    [("cope", {}), ("cope", {"num_positions": 2}), ("cope", {"num_positions": 500}), ("fire", {})],
)
def test_it_is_what_plain_operations_give_in_float64(name, options, impl, mask, kernel):
    encoding = filled(name, **options)
    got = attended(encoding, impl, mask)
    want = attended(encoding, "reference", mask, torch.float64)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=0)


def test_gates_may_be_other_than_the_scores(kernel):
    encoding = filled("cope", gates="value")
    got = attended(encoding, "blockwise")
    want = attended(encoding, "reference", dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=0)


def test_each_of_a_batch_may_have_its_own_positions(kernel):
    encoding = filled("fire")
    positions = torch.stack([torch.arange(LENGTH), 3 * torch.arange(LENGTH) + 7])
    got = attended(encoding, "blockwise", q_positions=positions)
    want = attended(encoding, "reference", dtype=torch.float64, q_positions=positions)
    torch.testing.assert_close(got.double(), want, atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["cope", "fire"])
def test_any_number_of_threads_gives_the_same_bits(name, compiled):
    encoding, before = filled(name), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(2)
            scores = torch.randn(2, HEADS, 50, 90)
            results.append(added(encoding, scores))
    finally:
        torch.set_num_threads(before)
    assert all(result.equal(results[0]) for result in results)


def added(encoding, scores: torch.Tensor) -> torch.Tensor:
    rows, keys = scores.shape[-2:]
    torch.manual_seed(3)
    q = posenc.Tokens(torch.randn(2, HEADS, rows, WIDTH), torch.arange(rows) + keys - rows, None, 1)
    k = posenc.Tokens(torch.randn(2, HEADS, keys, WIDTH), torch.arange(keys), None, 1)
    with torch.no_grad():
        return encoding.term(q, k).add(scores, slice(0, rows), slice(0, keys), None)


def test_a_score_that_is_no_number_stays_one_and_stays_in_its_row(compiled):
    scores = torch.zeros(2, HEADS, 5, 70)
    scores[0, 1, 2, 40] = torch.nan
    got = added(filled("cope"), scores)
    assert got[0, 1, 2, 40].isnan()
    got[0, 1, 2] = 0
    assert got.isfinite().all()


def test_an_end_that_all_counts_have_reached_is_read_once(compiled):
    """A gate of 1 at every key: the count is the distance to the last key, and 1 at it."""
    scores = torch.full((1, HEADS, 1, 300), 50.0)
    table = torch.randn(1, HEADS, 1, 8)
    with torch.no_grad():
        got = in_place.count_gates(scores.clone(), scores, table, None) - scores
    counts = (300 - torch.arange(300)).clamp(max=7)
    torch.testing.assert_close(got, table[..., counts], atol=1e-4, rtol=0)


def test_more_hidden_units_than_the_stack_holds_go_through_torch(monkeypatch, compiled):
    monkeypatch.setattr(in_place, "UNITS", 31)  # FIRE has 32
    monkeypatch.setattr(in_place, "add_network", None)
    added(filled("fire"), torch.zeros(2, HEADS, 5, 7))
    monkeypatch.setattr(in_place, "UNITS", 32)
    with pytest.raises(TypeError, match="not callable"):
        added(filled("fire"), torch.zeros(2, HEADS, 5, 7))


def test_it_leaves_alone_what_it_cannot_write_to(compiled):
    scores = torch.zeros(2, HEADS, 5, 7)
    with torch.no_grad():
        assert in_place.applies(scores, scores)
        assert not in_place.applies(scores.double())
        assert not in_place.applies(scores, scores.bfloat16())
        assert not in_place.applies(scores.mT)
        assert not in_place.applies(scores.to("meta"))
    assert not in_place.applies(scores)  # autograd may be watching
