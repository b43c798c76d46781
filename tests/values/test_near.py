"""What C gathers from vectors by distance: all weights written out in float64."""

from __future__ import annotations

import pytest
import torch

from posenc.values import near


@pytest.fixture(autouse=True)
def compiled():
    if not near.applies(torch.zeros(2, 4)):
        pytest.skip("there is no C compiler")


@pytest.mark.parametrize("far", [1, 5, 60])
@pytest.mark.parametrize("shift", [0, 7])
def test_it_is_the_sum_over_all_weights(far, shift):
    torch.manual_seed(0)
    rows, keys, width = 20, 20 + shift, 12
    q = torch.randn(2, 4, rows + 9, width)[:, :, 4 : 4 + rows]
    k = torch.randn(2, 2, keys + 3, width)[:, :, 3:]
    table, added = torch.randn(far + 1, width), torch.randn(2, 4, rows, keys)
    distance = shift + torch.arange(rows)[:, None] - torch.arange(keys)
    added = added.masked_fill((distance < 0) | (torch.rand(rows, keys) < 0.3), -torch.inf)
    added[0, :, 3] = -torch.inf  # a row that sees nothing
    k[1, :, 5] = torch.nan  # a key that nobody sees
    added[1, :, :, 5] = -torch.inf
    keys_seen = k.nan_to_num(0).double().repeat_interleave(2, 1)
    scores = 0.3 * q.double() @ keys_seen.mT + added.double()
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0)
    vectors = table.double()[distance.clamp(0, far)]
    want = torch.einsum("bhij,ijd->bhid", weights, vectors)
    got = near.near_values(q, k, 0.3, added, lse.float(), table, shift)
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


def test_a_query_that_is_not_a_number_gives_none():
    q, k, zeros = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.zeros(1, 1, 3, 3)
    q[0, 0, 1] = torch.nan
    got = near.near_values(q, k, 1.0, zeros, torch.zeros(1, 1, 3), torch.randn(3, 4), 0)
    assert got[0, 0, 1].isnan().all() and got[0, 0, [0, 2]].isfinite().all()


def test_rows_that_lie_apart_are_refused():
    q = torch.randn(1, 3, 4, 8)[..., ::2]
    with pytest.raises(ValueError, match="q must be a part"):
        near.near_values(
            q, torch.randn(1, 3, 4, 4), 1.0, torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 4),
            torch.randn(3, 4), 0,
        )  # fmt: skip


def test_only_what_the_stack_holds_is_taken():
    assert not near.applies(torch.zeros(near.FURTHEST + 1, 1))
    assert not near.applies(torch.zeros(2, 4, dtype=torch.float64))
