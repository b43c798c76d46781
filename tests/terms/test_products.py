"""What C adds for queries and keys against vectors by distance: pair by pair in float64."""

from __future__ import annotations

import pytest
import torch

from posenc.terms import products

SIZES = [(1, 1), (1, 9), (9, 1), (37, 101), (64, 64), (128, 200), (65, 49)]


@pytest.fixture(autouse=True)
def compiled():
    with torch.no_grad():
        given = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
        if not products.applies(*given):
            pytest.skip("there is no C compiler")
        yield


@pytest.mark.parametrize("of", ["queries", "keys"])
@pytest.mark.parametrize(("rows", "keys"), SIZES)
@pytest.mark.parametrize("width", [1, 24])
@pytest.mark.parametrize("shared", [True, False])
def test_sums_are_those_of_pairs(of, rows, keys, width, shared):
    torch.manual_seed(0)
    first, heads = 3, 2
    scores = torch.randn(2, heads, rows, keys + 5)
    vectors = torch.randn(2, heads, rows if of == "queries" else keys, width)
    table = torch.randn(1 if shared else heads, width, rows + keys + 4)[..., 2:]
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    entry = rows - 1 - i + j if of == "queries" else keys - 1 - j + i
    each = table.double().expand(heads, -1, -1)[..., entry]  # heads, width, rows, keys
    form = "bhid,hdij->bhij" if of == "queries" else "bhjd,hdij->bhij"
    want = scores.double()
    want[..., first : first + keys] += torch.einsum(form, vectors.double(), each)
    products.add(scores, first, first + keys, vectors, table, of)
    torch.testing.assert_close(scores.double(), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t[:, :, 2:9],
        lambda t: t.transpose(1, 2)[:, :, :7],
        lambda t: t[::2, :, 2:9],
        lambda t: t[:, :1, 2:9],
        lambda t: t[:1, :, 2:9],
        lambda t: t[:, :, 2:9, 1:],
        lambda t: t.mT[:, :, :7],
        lambda t: t.repeat_interleave(2, -1)[..., ::2],  # one step of two from number to number
        lambda t: t.mT.contiguous().mT[:, :1, :1],
    ],
)
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_vectors_may_lie_anywhere(cut, of):
    vectors = cut(torch.randn(4, 9, 9, 9))
    batch, heads, count, width = vectors.shape
    table = torch.randn(heads, width, 20)
    shape = (batch, heads, *((count, 5) if of == "queries" else (5, count)))
    found, want = torch.zeros(shape), torch.zeros(shape)
    products.add(found, 0, shape[-1], vectors, table, of)
    products.add(
        want, 0, shape[-1], vectors.clone(memory_format=torch.contiguous_format), table, of
    )
    assert torch.equal(found, want) and want.std() > 0


def test_what_is_not_a_number_stays_so():
    scores, q = torch.zeros(1, 1, 20, 50), torch.ones(1, 1, 20, 4)
    q[0, 0, 7, 2] = torch.nan
    products.add(scores, 0, 50, q, torch.ones(1, 4, 70), "queries")
    assert scores[0, 0, 7].isnan().all() and scores.isnan().sum() == 50


def test_a_table_that_is_too_short_is_refused():
    scores, q = torch.zeros(1, 1, 20, 50), torch.ones(1, 1, 20, 4)
    with pytest.raises(ValueError, match="needs 69 distances"):
        products.add(scores, 0, 50, q, torch.ones(1, 4, 68), "queries")


def test_only_plain_float32_is_taken():
    scores, q, table = torch.zeros(1, 1, 4, 8), torch.ones(1, 1, 4, 4), torch.ones(1, 4, 12).mT
    assert products.applies(scores, q, table)
    assert not products.applies(scores.double(), q.double(), table.double())
    assert not products.applies(scores[..., :7], q, table)
    assert not products.applies(scores, q, table.contiguous())
    assert not products.applies(scores, torch.ones(1, 1, 4, products.WIDTH + 1), table)
    with torch.enable_grad():
        assert not products.applies(scores, q, table)
