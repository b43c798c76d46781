"""Documents packed into one row are refused under a causal mask that does not keep them apart."""

import itertools

import pytest
import torch

import posenc
from posenc import masks
from posenc.positions.tokens import positions_restart
from tests import attending
from tests.compilers import needs_whole_graphs

ROPE = posenc.RoPE(8, interleaved=False)
PACKED = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6])
IDS = (torch.arange(12) >= 5).long()
REFUSED = r"mask & posenc\.masks\.document\(ids\)"


def attend(positions: torch.Tensor, mask: masks.Mask, encoding=ROPE, **options) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, positions.shape[-1], 8) for _ in range(3))
    return attending.attend(q, k, v, encoding, positions, mask, **options)


def valid(text: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in text]] * 2)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal,
        masks.causal & masks.sliding_window(3),
        masks.causal & masks.padding(torch.ones(2, 12)),
        masks.causal & masks.chunked(4),
        masks.attention_sinks(1, 3),
        masks.causal.bind(PACKED, PACKED),
        (masks.causal & masks.document(IDS)) | masks.attention_sinks(1, 3),
        masks.sliding_window(3),
        masks.chunked(4),
        masks.causal | masks.prefix(2),
        (masks.causal | masks.prefix(1)) & masks.sliding_window(4),
        masks.causal | masks.sliding_window(2),
        masks.causal & masks.permutation(rank=torch.arange(12), stream="content"),
        masks.causal & masks.full,
        masks.causal | masks.document(IDS),
        masks.causal | masks.Mask(lambda pairs: IDS[pairs.q_idx] == IDS[pairs.kv_idx]),
        ~masks.causal,
        ~(masks.document(IDS) & masks.causal),
        ~~(masks.causal | masks.prefix(2)),
        masks.causal | masks.padding(torch.arange(12)[None].expand(2, -1) < 5),
        masks.causal & ~(masks.padding(torch.arange(12)[None].expand(2, -1) < 5) & masks.full),
    ],
)
@pytest.mark.parametrize("encoding", [ROPE, posenc.ALiBi(2), posenc.CoPE(8)])
def test_what_begins_anew_is_refused(mask, encoding):
    with pytest.raises(ValueError, match=REFUSED):
        attend(PACKED, mask, encoding)


def test_one_packed_row_of_a_batch_is_enough_and_real_positions_too():
    with pytest.raises(ValueError, match=REFUSED):
        attend(torch.stack([torch.arange(12), PACKED]), masks.causal)
    with pytest.raises(ValueError, match=REFUSED):
        attend(PACKED / 2, masks.causal)


def test_a_cache_is_read_as_a_whole():
    cache = posenc.KVCache()
    attend(torch.arange(5), masks.causal, cache=cache)
    with pytest.raises(ValueError, match=r"^attention: the cache already holds position 0"):
        attend(torch.arange(3), masks.causal, cache=cache)
    assert cache.length == 5


def test_the_line_that_it_gives_keeps_documents_apart():
    ids = posenc.positions.documents_from_positions(PACKED)
    out = attend(PACKED, masks.causal & masks.document(ids))
    assert torch.equal(out, attend(PACKED, masks.causal & masks.document(IDS)))


@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.full,
        masks.padding(torch.ones(2, 12)),
        masks.permutation(rank=torch.arange(12), stream="content"),
        masks.document(IDS),
        ~masks.document(IDS),  # shows other documents on purpose
        masks.causal & ~masks.document(IDS),
        masks.document(IDS) & (masks.causal | masks.prefix(2)) & masks.sliding_window(3),
        masks.causal & ~(~masks.document(IDS) | ~masks.sliding_window(3)),
        masks.causal & masks.padding(torch.arange(12)[None].expand(2, -1) < 5),
        masks.causal & ~(masks.padding(torch.arange(12)[None].expand(2, -1) < 5)),
        masks.causal & masks.Mask(lambda pairs: IDS[pairs.q_idx] == IDS[pairs.kv_idx]),
        masks.Mask(lambda pairs: pairs.q_idx >= pairs.kv_idx),
    ],
)
def test_masks_that_may_keep_them_apart_or_compare_no_positions_run(mask):
    attend(PACKED, mask)


@pytest.mark.parametrize(
    "positions",
    [
        [0, 1, 2, 2, 2, 2, 3, 4],  # the tokens of an image
        [0, 0, 1, 1, 2, 2],  # grouped
        [0, 0, 0, 1, 2, 3],  # padded on the left
        [1, 1, 1, 0, 1, 2],  # the same in Hugging Face's generate
        [5, 6, 7, 0, 1, 2],  # a ring buffer
        [2, 2, 3, 3, 0, 0, 1, 1],
        [4, 2, 0, 3, 1],
        [3],
        [],
    ],
)
def test_neither_repeats_nor_another_order_are_refused(positions):
    positions = torch.tensor(positions, dtype=torch.long)
    attend(positions, masks.causal)
    attend(torch.stack([positions, positions]), masks.causal)
    assert not positions_restart(positions)


@pytest.mark.parametrize(
    ("positions", "text", "refused"),
    [
        ([0, 1, 2, 0, 0], "11100", False),
        ([0, 1, 2, 1, 1], "11100", False),
        ([0, 1, 2, 0, 0], "11111", True),
        ([0, 1, 0, 1, 2], "00111", False),
        ([0, 5, 6, 0, 1], "01111", False),  # a ring buffer whose first place is empty
        ([0, 1, 2, 0, 0, 1], "111011", True),
        ([0, 1, 2, 9, 0, 1], "111011", True),
        ([3, 4, 5, 1, 2, 3], "111111", True),  # two texts that begin elsewhere
    ],
)
def test_padding_does_not_count_where_the_mask_hides_it(positions, text, refused):
    positions, mask = torch.tensor(positions), masks.causal & masks.padding(valid(text))
    if not refused:
        attend(positions, mask)
        return
    with pytest.raises(ValueError, match=REFUSED):
        attend(positions, mask)


def test_it_goes_back_as_the_words_say():
    """Against the definition, token by token."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for _ in range(2000):
        length = int(torch.randint(1, 8, (), generator=generator))
        row = torch.randint(6, (length,), generator=generator).tolist()
        runs = [[row[0]]]
        for before, here in itertools.pairwise(row):
            if here < before:
                runs.append([])
            runs[-1].append(here)
        shared = [
            (a, b)
            for a, b in itertools.combinations(range(len(runs)), 2)
            if set(runs[a]) & set(runs[b])
        ]
        if len(set(runs[0])) == 1:  # padding on the left, before its own text
            shared = [pair for pair in shared if pair != (0, 1)]
        assert positions_restart(torch.tensor(row)) == bool(shared), row
        again = any(row[i] < row[i - 1] and row[i] in row[:i] for i in range(1, length))
        assert not again or shared, "a text that begins at an earlier token's position"
        seen.add(bool(shared))
    assert seen == {True, False}


MROPE = posenc.MRoPE(8, sections=(2, 1, 1), interleaved=False)
PICTURES = [
    posenc.mrope_positions(segments) for segments in ([5], [3, (1, 2, 2), 2], [2, (2, 1, 2)])
]
PACKED_PICTURES = torch.cat(PICTURES)
OF_PICTURES = torch.repeat_interleave(torch.arange(3), torch.tensor([len(p) for p in PICTURES]))


def attend_pictures(positions: torch.Tensor, mask: masks.Mask, encoding=MROPE) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, positions.shape[-2], 8) for _ in range(3))
    where = {"q_positions": positions, "kv_positions": positions}
    return posenc.attention(q, k, v, encoding, **where, mask=mask)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal,
        masks.causal & masks.sliding_window(3),
        masks.causal | masks.prefix(2),
        masks.causal & masks.padding(torch.ones(2, len(OF_PICTURES))),
        masks.causal | masks.document(OF_PICTURES),
    ],
)
@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("rows", [None, 1, 2])
def test_packed_texts_with_pictures_are_refused(mask, start, rows):
    positions = PACKED_PICTURES + start
    positions = positions if rows is None else positions.expand(rows, -1, -1)
    said = f"return to the text that begins their row.*{REFUSED}"
    with pytest.raises(ValueError, match=said):
        attend_pictures(positions, mask)
    attend_pictures(positions, mask & masks.document(OF_PICTURES))
    attend_pictures(positions, masks.full)


def test_packed_texts_with_pictures_are_refused_in_any_row_and_beside_padding():
    one = posenc.mrope_positions([len(OF_PICTURES)])
    with pytest.raises(ValueError, match=REFUSED):
        attend_pictures(torch.stack([one, PACKED_PICTURES]), masks.causal)
    padded = torch.cat([torch.ones(2, 3, dtype=torch.long), PACKED_PICTURES])
    real = (torch.arange(len(padded)) >= 2).expand(2, -1)
    with pytest.raises(ValueError, match=REFUSED):
        attend_pictures(padded, masks.causal & masks.padding(real))


def cells(*sizes: int) -> torch.Tensor:
    return torch.cartesian_prod(*(torch.arange(n) for n in sizes))


@pytest.mark.parametrize(
    "positions",
    [
        posenc.mrope_positions([3, (1, 2, 2), 2, (4, 2, 2), 3]),
        posenc.mrope_positions([(1, 3, 3), 4, (1, 3, 3)]),  # it begins with a picture
        torch.cat([torch.ones(3, 3, dtype=torch.long), posenc.mrope_positions([3, (1, 2, 2)])]),
        torch.cat([posenc.mrope_positions([3, (1, 2, 2)]), torch.ones(3, 3, dtype=torch.long)]),
        torch.cat([cells(1, 3, 4)] * 3),
        torch.cat([cells(2, 2, 2).flip(-1)] * 3),
        posenc.mrope_positions([9]).roll(4, 0),  # a ring buffer
        posenc.mrope_positions([3])[:1].expand(6, 3),
    ],
)
def test_neither_grids_nor_padding_return_to_a_text(positions):
    attend_pictures(positions, masks.causal)
    attend_pictures(torch.stack([positions, positions]), masks.causal)


def test_grids_that_repeat_their_places_are_no_texts():
    axial = posenc.AxialRoPE(8, interleaved=False)
    classes = torch.cat([posenc.positions.grid(3, 3, class_tokens=1)] * 2)
    for positions in (torch.cat([cells(3, 3)] * 4), classes, torch.cat([cells(3, 3).flip(-1)] * 4)):
        attend_pictures(positions, masks.causal, axial)


def test_padding_that_repeats_a_text_does_not_count():
    text = posenc.mrope_positions([4])
    positions = torch.cat([text, text[:3]])
    hidden = masks.padding((torch.arange(7) < 4).expand(2, -1))
    attend_pictures(positions, masks.causal & hidden)
    with pytest.raises(ValueError, match=REFUSED):
        attend_pictures(positions, masks.causal)


def test_a_first_document_of_one_token_is_not_noticed_by_itself():
    """As `causal` says: it looks like two events at one time."""
    positions = torch.tensor([0, 0, 1, 2, 3])
    attend(positions, masks.causal)
    ids = torch.tensor([0, 1, 1, 1, 1])
    apart = attend(positions, masks.causal & masks.document(ids))
    assert not torch.allclose(attend(positions, masks.causal)[:, :, 1:], apart[:, :, 1:])
    with pytest.raises(ValueError, match=REFUSED):
        attend(torch.tensor([0, 0, 1, 2, 0, 1]), masks.causal)  # another begins


@needs_whole_graphs
def test_nothing_is_read_in_a_trace():
    def call(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attending.attend(x, x, x, ROPE, positions, impl="reference")

    x = torch.randn(2, 2, 12, 8)
    compiled = torch.compile(call, fullgraph=True, backend="eager")(x, PACKED)

    class Module(torch.nn.Module):
        forward = staticmethod(call)

    exported = torch.export.export(Module(), (x, PACKED)).module()(x, PACKED)
    torch.testing.assert_close(exported, compiled)
    meta = call(x.to("meta"), PACKED.to("meta"))
    assert meta.shape == compiled.shape
    torch.compiler.reset()


def layers():
    return [posenc.Attention(32, 2, encoding="rope").eval() for _ in range(2)]


def test_two_layers_cannot_share_a_cache():
    cache, x = posenc.KVCache(), torch.randn(1, 4, 32)
    first, second = layers()
    first(x, range(4), cache=cache, mask=masks.causal)
    said = (
        r"^attention: the cache already holds position 0\. One KVCache per layer; the next "
        r"position is cache\.length\. For packed rows: mask & masks\.document\(ids\)\.$"
    )
    with pytest.raises(ValueError, match=said):
        second(x, range(4), cache=cache, mask=masks.causal)
    assert cache.length == 4


@pytest.mark.parametrize("again", [0, 2, 3])
def test_positions_of_a_cache_must_advance(again):
    cache, (layer, _) = posenc.KVCache(), layers()
    layer(torch.randn(2, 4, 32), torch.arange(4).expand(2, -1), cache=cache, mask=masks.causal)
    with pytest.raises(ValueError, match=f"the cache already holds position {again}"):
        layer(torch.randn(2, 1, 32), torch.tensor([[9], [again]]), cache=cache, mask=masks.causal)
    layer(torch.randn(2, 1, 32), torch.tensor([[9], [4]]), cache=cache, mask=masks.causal)
    assert cache.length == 5


def test_a_position_of_padding_may_come_again():
    cache, (layer, _) = posenc.KVCache(), layers()
    valid = torch.tensor([[True, True, True, True], [True, True, False, False]])
    layer(torch.randn(2, 4, 32), range(4), cache=cache, mask=masks.causal & masks.padding(valid))
    valid = torch.cat([valid, torch.ones(2, 1, dtype=torch.bool)], 1)
    mask = masks.causal & masks.padding(valid)
    layer(torch.randn(2, 1, 32), torch.tensor([[4], [2]]), cache=cache, mask=mask)
    assert cache.length == 5
