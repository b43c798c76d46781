"""Define ready masks: causal, windows, padding, documents, prefixes, chunks, factorisation
orders."""

from functools import partial

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from posenc.arguments import FARTHEST_POSITION, check_count, explain_misfits
from posenc.masks.mask import PADDING_NAME, CapturedTensor, Mask, QueryKeyPairs
from posenc.positions.tokens import check_tensor, check_valid, values_at

# Predicates of the masks below: True where a query sees a key. The result has the shape to which
# the tensors of `pairs` that the predicate reads broadcast.


def _shows_all_keys(pairs: QueryKeyPairs) -> Tensor:
    """Return True for every pair: the predicate of `full`. The comparison only gives the tensor its
    shape."""
    return torch.ones_like(pairs.q_position >= pairs.kv_position)


def _key_is_not_later(pairs: QueryKeyPairs) -> Tensor:
    """Return True where the key's position is not above the query's: the predicate of `causal`."""
    return pairs.q_position >= pairs.kv_position


full = Mask(_shows_all_keys, exact=True, separates_documents=None)
"""Mask that shows all keys to all queries."""

causal = Mask(_key_is_not_later, causal=True, exact=True, separates_documents=False)
"""Mask that shows keys at the query's own and at earlier positions, in any order in memory.

Documents packed into one row, each with positions from 0 on, see one another: add `&
document(ids)`. Without it attention raises ValueError if keys return to earlier positions, as it
does for every mask that compares positions, also within a combination of masks. Positions are
checked on the CPU only, and not under torch.compile, export or tracing. A first document of one
token cannot be detected: 0, 0, 1, 2 may also be two events at one time.

With positions of several components (M-RoPE, rows and columns) it compares the order in memory, and
queries are the last tokens: attention raises ValueError if they are not those of the last keys.
Packed documents are then detected only where a row begins with a text, (p, p, p) and (p + 1, p + 1,
p + 1), and returns to it. Grids may repeat their places, so they are not detected.
"""


@explain_misfits
def sliding_window(window_size: int) -> Mask:
    """Show keys less than `window_size` positions away, on both sides.

    `causal & sliding_window(w)` shows w keys counting the query itself, as Hugging Face and Gemma
    do. Without causal, Gemma shows 2w - 1 keys like this function, Hugging Face 2w + 1: use w + 1.
    """
    check_count("sliding_window", "window_size", window_size, most=FARTHEST_POSITION)
    is_near = partial(_key_is_within_window, window_size)
    return Mask(is_near, window=window_size, exact=True, separates_documents=False)


def _key_is_within_window(window_size: int, pairs: QueryKeyPairs) -> Tensor:
    """Return True where query and key are less than `window_size` positions apart."""
    return (pairs.q_position - pairs.kv_position).abs() < window_size


@explain_misfits
def padding(valid: Shaped[Tensor, "batch kv_len"]) -> Mask:
    """Show only keys where `valid` (batch, kv_len) is True or nonzero, wherever the padding is.

    Raises: TypeError for anything but a tensor; ValueError for another shape, and for numbers below
    0, as in a mask that is added to scores (give mask == 0).
    """
    check_valid("padding", valid)
    if valid.ndim != 2:
        raise ValueError(
            f"padding: valid must have shape (batch, kv_len), got {tuple(valid.shape)}."
        )
    valid = valid.bool()
    captured = CapturedTensor(PADDING_NAME, valid, ("batch", "kv_len"))
    return Mask(partial(_key_is_no_padding, valid), captured=(captured,), separates_documents=None)


def _key_is_no_padding(valid: Tensor, pairs: QueryKeyPairs) -> Tensor:
    """Return True where the key is a valid token by `valid` (batch, kv_len): the predicate of
    `padding`."""
    return valid[pairs.batch, pairs.kv_idx]


@explain_misfits
def document(
    q_documents: Shaped[Tensor, "*batch q_len"],
    kv_documents: Shaped[Tensor, "*kv_batch kv_len"] | None = None,
) -> Mask:
    """Show only keys of the query's own document.

    Args:
        q_documents: document ids of the queries, (q_len) or (batch, q_len).
        kv_documents: document ids of the keys, (kv_len) or (batch, kv_len); None for the same as
            those of the queries.

    Raises: TypeError for anything but tensors.
    """
    check_tensor("document", "q_documents", q_documents, "document ids")
    if kv_documents is not None:
        check_tensor("document", "kv_documents", kv_documents, "document ids")
    q_ids = _drop_single_row(q_documents)
    kv_ids = q_ids if kv_documents is None else _drop_single_row(kv_documents)
    return Mask(
        partial(_key_is_in_same_document, q_ids, kv_ids),
        captured=(
            # ids (len) have the last of these axes only, ids (batch, len) both.
            CapturedTensor("documents of queries", q_ids, ("batch", "q_len")[-q_ids.ndim :]),
            CapturedTensor("documents of keys", kv_ids, ("batch", "kv_len")[-kv_ids.ndim :]),
        ),
    )


def _drop_single_row(ids: Tensor) -> Tensor:
    """Return ids (1, len) as (len), because ids (len) fit any batch size of attention. Return other
    ids unchanged."""
    return ids[0] if ids.ndim == 2 and ids.shape[0] == 1 else ids


def _key_is_in_same_document(q_ids: Tensor, kv_ids: Tensor, pairs: QueryKeyPairs) -> Tensor:
    """Return True where query and key have the same document id, by ids (len) or (batch, len): the
    predicate of `document`."""
    q_document = values_at(q_ids, pairs.batch, pairs.q_idx)
    kv_document = values_at(kv_ids, pairs.batch, pairs.kv_idx)
    return q_document == kv_document


@explain_misfits
def prefix(length: int | Int[Tensor, " batch"]) -> Mask:
    """Show keys at positions below `length` to all queries.

    length: a whole number of tokens, or a tensor (batch,) with one for each row.

    `causal | prefix(n)` is the prefix language model: the first n tokens see one another.
    """
    if not isinstance(length, Tensor):
        check_count("prefix", "length", length, 0, FARTHEST_POSITION)
        return Mask(partial(_key_is_below, length), separates_documents=False)
    if length.ndim != 1:
        raise ValueError(f"prefix: length must have shape (batch,), got {tuple(length.shape)}.")
    captured = CapturedTensor("prefix", length, ("batch",))
    return Mask(
        partial(_key_is_below_row_length, length), captured=(captured,), separates_documents=False
    )


def _key_is_below(length: int, pairs: QueryKeyPairs) -> Tensor:
    """Return True where the key's position is below `length`, for every query."""
    return pairs.kv_position < length


def _key_is_below_row_length(length: Tensor, pairs: QueryKeyPairs) -> Tensor:
    """Return True where the key's position is below the length of its batch row. `length`:
    (batch,)."""
    return pairs.kv_position < length[pairs.batch]


@explain_misfits
def attention_sinks(num_sinks: int, window_size: int) -> Mask:
    """Show keys that are not later than the query, and that either have one of the first
    `num_sinks` positions or are less than `window_size` positions away (StreamingLLM). The window
    counts the query itself.

    Source: Xiao et al. 2023, arXiv:2309.17453.
    """
    check_count("attention_sinks", "num_sinks", num_sinks, 0, FARTHEST_POSITION)
    check_count("attention_sinks", "window_size", window_size, most=FARTHEST_POSITION)
    return causal & (sliding_window(window_size) | prefix(num_sinks))


@explain_misfits
def chunked(chunk_size: int) -> Mask:
    """Show only keys in the query's own chunk of positions; chunks begin at multiples of
    `chunk_size`. `causal & chunked(n)` is Llama 4's."""
    check_count("chunked", "chunk_size", chunk_size, most=FARTHEST_POSITION)
    # Tokens of one chunk are less than chunk_size apart, and tokens that are this near may be in
    # two chunks: the window is true, but does not describe the mask, so it is not `exact`.
    return Mask(
        partial(_key_is_in_same_chunk, chunk_size), window=chunk_size, separates_documents=False
    )


def _key_is_in_same_chunk(chunk_size: int, pairs: QueryKeyPairs) -> Tensor:
    """Return True where the positions of query and key are in the same chunk. Chunks begin at
    multiples of `chunk_size`."""
    return pairs.q_position // chunk_size == pairs.kv_position // chunk_size


@explain_misfits
def windows(
    height: int,
    width: int,
    window_size: int,
    *,
    shift: int = 0,
    device: torch.device | None = None,
) -> Mask:
    """Show only keys in the query's own window of a grid of cells, row by row, as in Swin.

    Windows of window_size x window_size begin `shift` rows and columns after the corner; what is
    before and after the whole windows is a window of its own. This is Swin's cyclic shift with its
    mask, without moving a cell. Swin shifts by half a window in every second layer, but not where
    the grid is one window high or wide. Give RelativeBias2D the cell inside of the window:

        (posenc.positions.grid(height, width) - shift) % window_size

    The queries and keys are the cells of the grid and nothing else. To save time, Swin attends in
    each window for itself; this mask hides pairs of an attention over the whole grid.

    Raises: ValueError for a size below 1, a grid that is no multiple of the window (Swin then adds
    cells of zeros, which its queries see), or a shift that is not below window_size.
    Source: Liu et al. 2021, arXiv:2103.14030, section 3.2.

    >>> posenc.masks.windows(2, 4, 2).tensor(8).int()[0]  # what the first cell sees
    tensor([1, 1, 0, 0, 1, 1, 0, 0], dtype=torch.int32)
    """
    check_count("windows", "height", height)
    check_count("windows", "width", width)
    check_count("windows", "window_size", window_size)
    check_count("windows", "shift", shift, 0)
    if height % window_size or width % window_size or shift >= window_size:
        raise ValueError(
            f"windows: height and width must be multiples of window_size, and shift below it, got "
            f"{height} x {width}, window_size={window_size}, shift={shift}."
        )
    # Rounded down, -1 for the cells before the first whole window.
    row_of_windows = (torch.arange(height, device=device) - shift) // window_size
    column_of_windows = (torch.arange(width, device=device) - shift) // window_size
    windows_in_a_row = width // window_size + 1
    window = row_of_windows[:, None] * windows_in_a_row + column_of_windows
    return document(window.flatten())


@explain_misfits
def permutation(
    *,
    order: Int[Tensor, "*batch len"] | None = None,
    rank: Int[Tensor, "*batch len"] | None = None,
    stream: str,
) -> Mask:
    """Show keys that come earlier in a factorisation order (XLNet). Give the order or the ranks.

    Args:
        order: the tokens in the order in which they are predicted, (len) or (batch, len): XLNet's
            3 -> 2 -> 4 -> 1, counted from 0, is [2, 1, 3, 0].
        rank: each token's rank in the order, its argsort: [3, 1, 0, 2]. A negative rank marks
            context, which every query sees.
        stream: "content": tokens also see themselves; "query": they do not, so they can be
            predicted.

    The queries must be the tokens of the keys, all of them: attention raises ValueError for fewer.
    Source: Yang et al. 2019, arXiv:1906.08237, section 2.3.

    >>> mask = posenc.masks.permutation(order=torch.tensor([2, 1, 3, 0]), stream="query")
    >>> mask.tensor(4).int()
    tensor([[0, 1, 1, 1],
            [0, 0, 1, 0],
            [0, 0, 0, 0],
            [0, 1, 1, 0]], dtype=torch.int32)
    """
    if stream not in ("content", "query"):
        raise ValueError(f'permutation: stream must be "content" or "query", got {stream!r}.')
    if (order is None) == (rank is None):
        raise ValueError("permutation: give one of order= and rank=.")
    if rank is not None:
        check_tensor("permutation", "rank", rank, "ranks")
    else:
        check_tensor("permutation", "order", order, "tokens")
        assert order is not None
        rank = order.argsort(-1)
        all_tokens = torch.arange(order.shape[-1], device=order.device)
        # Reading numbers would break a trace, so a compiled call trusts the order.
        if not torch.compiler.is_compiling() and not bool(
            (order.gather(-1, rank) == all_tokens).all()
        ):
            raise ValueError(
                "permutation: order must name each token from 0 to "
                f"{len(all_tokens) - 1} once; places that may be negative are rank=."
            )
    return Mask(
        partial(_key_is_earlier_in_order, rank, stream == "content"),
        captured=(
            CapturedTensor("rank", rank, ("batch", "kv_len")[-rank.ndim :]),
            CapturedTensor("rank of queries", rank, ("batch", "q_len")[-rank.ndim :]),
        ),
        separates_documents=None,
    )


def _key_is_earlier_in_order(rank: Tensor, sees_itself: bool, pairs: QueryKeyPairs) -> Tensor:
    """Return True where the key's rank is below the query's; where it is negative, which marks
    context; and, if `sees_itself`, where key and query are one token. rank: (len) or (batch, len).
    """
    q_rank = values_at(rank, pairs.batch, pairs.q_idx)
    kv_rank = values_at(rank, pairs.batch, pairs.kv_idx)
    is_earlier = (kv_rank < q_rank) | (kv_rank < 0)
    if not sees_itself:
        return is_earlier
    return is_earlier | (pairs.q_idx == pairs.kv_idx)
