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
    side = min(9, encoding.claims.max_positions or 9)
    at_keys = torch.randint(side, (5, axes))
    where = {
        "q_positions": torch.cat([torch.randint(side, (4, axes)), at_keys]),
        "kv_positions": at_keys,
    }
    given, seen = MASKS[mask]
    by_pair = masks.Mask(lambda pairs: seen[pairs.batch, pairs.q_idx, pairs.kv_idx])
    want = posenc.attention(
        q,
        k,
        v,
        encoding,
        mask=by_pair.bind(torch.arange(9), torch.arange(5)),
        impl="reference",
        **where,
    )
    ran = 0
    for impl in ("auto", *WAYS):
        try:
            out = posenc.attention(q, k, v, encoding, mask=given, impl=impl, **where)
        except ValueError as refusal:
            assert "cannot run" in str(refusal)
            continue
        torch.testing.assert_close(out, want)
        ran += 1
    # A bias of each pair is computed block by block only.
    assert ran >= (3 if 3 in encoding.claims.places else 4)


def attended(positions, mask, rows=slice(None), axes=3):
    """Return the output for the queries at `rows` of tokens at these positions."""
    torch.manual_seed(0)
    positions = torch.as_tensor(positions)
    q, k, v = torch.randn(3, 1, 2, positions.shape[-2], 24)
    encoding = (
        posenc.MRoPE(24, interleaved=False)
        if axes == 3
        else posenc.AxialRoPE(24, interleaved=False)
    )
    return posenc.attention(
        q[:, :, rows],
        k,
        v,
        encoding,
        q_positions=positions[rows],
        kv_positions=positions,
        mask=mask,
    )


TEXT = torch.arange(6)[:, None].expand(6, 3)
COMPARING = {
    "causal": masks.causal,
    "window": masks.sliding_window(3),
    "with documents": masks.causal & masks.document(torch.zeros(2), torch.zeros(6)),
    "inverted": ~masks.chunked(2) | masks.padding(torch.ones(1, 6)),
    "own": posenc.Mask(lambda pairs: pairs.q_position >= pairs.kv_position),
}


@pytest.mark.parametrize("mask", COMPARING)
@pytest.mark.parametrize("start", [0, 2, 3])
def test_queries_that_are_not_the_last_are_refused(mask, start):
    with pytest.raises(ValueError, match=r"not those of the last keys. Bind the mask"):
        attended(TEXT, COMPARING[mask], slice(start, start + 2))


def test_as_many_queries_at_other_places_are_refused():
    q, encoding = torch.randn(1, 2, 3, 24), posenc.MRoPE(24, interleaved=False)
    where = {"q_positions": TEXT[:3], "kv_positions": TEXT[3:]}
    with pytest.raises(ValueError, match="not those of the last keys"):
        posenc.attention(q, q, q, encoding, mask=masks.causal, **where)
    seen = posenc.attention(q, q, q, encoding, mask=masks.padding(torch.ones(1, 3)), **where)
    assert seen.isfinite().all()


def test_a_block_of_queries_bound_to_its_place():
    whole = attended(TEXT, masks.causal)
    for start in (0, 2, 4):
        bound = masks.causal.bind(range(start, start + 2), range(6))
        part = attended(TEXT, bound, slice(start, start + 2))
        torch.testing.assert_close(part, whole[:, :, start : start + 2])
    torch.testing.assert_close(attended(TEXT, masks.causal, slice(3, 6)), whole[:, :, 3:])


PACKED = {
    "texts": posenc.mrope_positions([3]).repeat(2, 1),
    "text and image": torch.cat([posenc.mrope_positions([4]), posenc.mrope_positions([(1, 2, 2)])]),
    "images of one row": posenc.positions.grid(1, 3).repeat(2, 1),
    "images": posenc.positions.grid(2, 2).repeat(2, 1),
    "images with class tokens": posenc.positions.grid(2, 2, class_tokens=1).repeat(2, 1),
}


ONE_DOCUMENT = {
    "text, image, text, video": posenc.mrope_positions([2, (1, 2, 3), 3, (3, 2, 2), 1]),
    "padding on the left": torch.cat([torch.ones(3, 3).long(), posenc.mrope_positions([4])]),
    "column by column": posenc.positions.grid(3, 3).view(3, 3, 2).transpose(0, 1).flatten(0, 1),
    "blocks of 2 x 2": posenc.positions.grid(4, 4)
    .view(2, 2, 2, 2, 2)
    .transpose(1, 2)
    .reshape(16, 2),
    "class tokens": posenc.positions.grid(2, 2, class_tokens=2),
    "class token at the end": posenc.positions.grid(2, 2, class_tokens=1).roll(-1, 0),
}


@pytest.mark.parametrize("name", ONE_DOCUMENT)
def test_one_document_is_not_taken_for_packed(name):
    positions = ONE_DOCUMENT[name]
    count, axes = positions.shape
    got = attended(positions, masks.causal, axes=axes)
    want = attended(positions, masks.causal.bind(range(count), range(count)), axes=axes)
    torch.testing.assert_close(got, want)
    last = attended(positions, masks.causal, slice(-3, None), axes=axes)
    torch.testing.assert_close(last, want[:, :, -3:])


def test_a_cache_in_steps_and_chunks():
    layer = posenc.Attention(48, 2, encoding=posenc.MRoPE(24, interleaved=False))
    positions = posenc.mrope_positions([2, (1, 2, 2), 3])
    x, cache = torch.randn(1, 9, 48), posenc.KVCache()
    whole = layer(x, positions, mask=masks.causal)
    parts = [
        layer(x[:, a:b], positions[a:b], mask=masks.causal, cache=cache)
        for a, b in ((0, 4), (4, 7), (7, 8), (8, 9))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize(
    ("q_positions", "kv_positions", "error", "message"),
    [
        (TEXT[:2], TEXT, ValueError, "no order: bind the mask to that in memory"),
        (TEXT[None], TEXT[None], ValueError, r"\(1, 6, 3\)"),
        (torch.tensor(1), range(6), ValueError, r"\(len\) or \(batch, len\)"),
        ([0, 1], range(2), TypeError, "or a range, got list"),
        (range(2), torch.tensor([True, False]), TypeError, "got booleans"),
    ],
)
def test_bind_takes_positions_of_one_component(q_positions, kv_positions, error, message):
    with pytest.raises(error, match=message):
        masks.causal.bind(q_positions, kv_positions)
