"""Where a position has several components, masks count tokens in memory, from the last key on."""

import pytest
import torch

import posenc
from posenc import masks
from posenc.attend.choose import WAYS

SHAPE = posenc.ModelShape(48, 2, train_length=32)
VALID = torch.tensor([[True, True, False, True, True], [False, True, True, True, True]])
Q_IDS, KV_IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2]), torch.tensor([0, 0, 1, 1, 2])
NAMES = [
    name
    for name in posenc.names()
    if (claims := posenc.create(name, SHAPE).claims).num_axes > 1 and claims.places != (1,)
]
i, j = torch.arange(-4, 5)[:, None], torch.arange(5)
MASKS = {
    "padding": (masks.padding(VALID), VALID[:, None].expand(2, 9, 5)),
    "document": (masks.document(Q_IDS, KV_IDS), (Q_IDS[:, None] == KV_IDS).expand(2, 9, 5)),
    "window": (masks.sliding_window(3), ((i - j).abs() < 3).expand(2, 9, 5)),
    "causal": (masks.causal, (i >= j).expand(2, 9, 5)),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask", MASKS)
def test_more_queries_than_keys_see_what_the_mask_says(name, mask):
    torch.manual_seed(0)
    encoding = posenc.create(name, SHAPE).double()
    axes = encoding.claims.num_axes
    q, k, v = (torch.randn(2, 2, n, 24, dtype=torch.float64) for n in (9, 5, 5))
    where = {
        "q_positions": torch.randint(9, (9, axes)),
        "kv_positions": torch.randint(9, (5, axes)),
    }
    given, seen = MASKS[mask]
    by_pair = masks.Mask(lambda sight: seen[sight.batch, sight.q_idx, sight.kv_idx])
    want = posenc.attention(
        q, k, v, encoding, mask=by_pair.bind(torch.arange(9), torch.arange(5)), impl="reference",
        **where,
    )  # fmt: skip
    ran = 0
    for impl in ("auto", *WAYS):
        try:
            out = posenc.attention(q, k, v, encoding, mask=given, impl=impl, **where)
        except ValueError as refusal:
            assert "cannot run" in str(refusal)
            continue
        torch.testing.assert_close(out, want)
        ran += 1
    assert ran >= 4
