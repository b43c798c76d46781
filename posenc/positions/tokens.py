"""Positions of tokens: their types, how they are compared, and how masks and documents number
them."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Real, Shaped
from torch import Tensor

from posenc.arguments import FARTHEST_POSITION, check_count, explain_misfits

PositionTensor = Real[Tensor, "#batch len *axes"] | Real[Tensor, "len *axes"]
"""Positions as a tensor: (len) or (batch, len), with a last axis if they have components."""
QueryPositionTensor = Real[Tensor, "#batch q_len *q_axes"] | Real[Tensor, "q_len *q_axes"]
KeyPositionTensor = Real[Tensor, "#batch kv_len *kv_axes"] | Real[Tensor, "kv_len *kv_axes"]
Positions = PositionTensor | range
"""Positions as a tensor or a range."""
QueryPositions = QueryPositionTensor | range
KeyPositions = KeyPositionTensor | range
ContextPositions = (
    Real[Tensor, "#batch context_len *context_axes"]
    | Real[Tensor, "context_len *context_axes"]
    | range
)
MemoryPositions = (
    Real[Tensor, "#batch memory_len *memory_axes"] | Real[Tensor, "memory_len *memory_axes"] | range
)
AnyPositions = Shaped[Tensor, "..."] | range
"""Positions of any shape, as a tensor or a range."""
FlatQueryPositions = Real[Tensor, "*#batch q_len"]
"""Positions of queries with one component, (q_len) or (batch, q_len)."""
FlatKeyPositions = Real[Tensor, "*#batch kv_len"]
Documents = Int[Tensor, "*batch len"]


def consecutive_positions(
    start: int, length: int, device: torch.device | None = None
) -> Int[Tensor, " length"] | range:
    """Return positions start, start + 1, ... as a range, or under torch.compile as a tensor,
    because it would recompile for each range.

    >>> posenc.positions.consecutive_positions(3, 4)
    range(3, 7)
    """
    if torch.compiler.is_compiling():
        return torch.arange(start, start + length, device=device)
    return range(start, start + length)


def as_tensor(
    positions: AnyPositions, device: torch.device | None = None
) -> Shaped[Tensor, "*batch_len_axes"]:
    """Convert positions to a tensor; a range is created on `device`."""
    if isinstance(positions, range):
        return torch.arange(positions.start, positions.stop, positions.step, device=device)
    return positions


def num_tokens(positions: AnyPositions, num_axes: int = 1) -> int:
    """Return the number of tokens in a row: the length of the last axis, or of the axis before it
    if positions have several components (num_axes > 1)."""
    if isinstance(positions, range):
        return len(positions)
    return positions.shape[-1 if num_axes == 1 else -2]


def as_range(positions: AnyPositions) -> range | None:
    """Return consecutive positions as a range. Return None unless all rows are known to be the same
    range.

    Tensors are read only on the CPU and not while tracing, where this needs no synchronisation.
    """
    if torch.compiler.is_compiling():
        return None
    if isinstance(positions, range):
        return positions if positions.step == 1 and len(positions) else None
    if not _is_readable(positions) or positions.is_floating_point() or not positions.numel():
        return None
    start = int(positions[(0,) * positions.ndim])
    stop = start + positions.shape[-1]
    consecutive = torch.arange(start, stop).expand_as(positions)
    return range(start, stop) if torch.equal(positions.long(), consecutive) else None


def offset_of_first_query(q_positions: AnyPositions, kv_positions: AnyPositions) -> int | None:
    """Return the first query's position minus the first key's; None unless both are known to be
    consecutive, see `as_range`."""
    q_range = as_range(q_positions)
    kv_range = None if q_range is None else as_range(kv_positions)
    return None if q_range is None or kv_range is None else q_range.start - kv_range.start


def values_at(
    values: Shaped[Tensor, "..."] | range | None,
    batch: Int[Tensor, "..."],
    index: Int[Tensor, "..."],
) -> Shaped[Tensor, "..."]:
    """Return the value of each of the tokens `index` in the rows `batch`, such as its position or
    document. `values` is (len), (batch, len), a range, or None for 0, 1, 2, ..."""
    if values is None:
        return index
    if isinstance(values, range):
        return index * values.step + values.start
    if values.ndim == 2 and values.shape[0] == 1:
        values = values[0]
    return values[index] if values.ndim == 1 else values[batch, index]


def has_no_place(positions: Real[Tensor, "*where axes"]) -> Shaped[Tensor, "*where"]:
    """Return booleans, True for each token without a place on a grid, such as the class token of a
    Vision Transformer: the components of its position are NaN. Integers are always a place,
    negative ones too.

    Shapes: positions (len, axes) or (batch, len, axes) -> (len) or (batch, len).

    >>> posenc.positions.has_no_place(posenc.positions.grid(1, 2, class_tokens=1))
    tensor([ True, False, False])
    """
    return positions.isnan().any(-1)


def move_placeless_to_origin(positions: Real[Tensor, "*where axes"]) -> Real[Tensor, "*where axes"]:
    """Return positions with tokens that have no place moved to 0 on every axis; see
    `has_no_place`."""
    if not positions.is_floating_point():
        return positions
    return positions.masked_fill(has_no_place(positions)[..., None], 0)


def concatenate_positions(
    first: AnyPositions, second: AnyPositions, axis: int, batch: int, device: torch.device
) -> AnyPositions:
    """Concatenate positions along `axis`, which is negative: it counts from the end. If only one of
    them has a batch axis, the other is repeated for `batch` rows. If one has a single row, it is
    repeated for the rows of the other."""
    if isinstance(first, range) and isinstance(second, range):
        if first.step == second.step == 1 and first.stop == second.start:
            return range(first.start, second.stop)
    tensors = [as_tensor(t, device) for t in (first, second)]
    ndim = max(t.ndim for t in tensors)
    tensors = [t if t.ndim == ndim else t.expand(batch, *t.shape) for t in tensors]
    if ndim + axis > 0:
        num_rows = max(map(len, tensors))
        tensors = [t.expand(num_rows, *t.shape[1:]) for t in tensors]
    return torch.cat(tensors, dim=axis)


def positions_restart(
    positions: Real[Tensor, "*#batch len"] | range, valid: Bool[Tensor, "*#rows len"] | None = None
) -> bool:
    """Return True if positions are known to restart in a row, as in packed documents.

    They restart if two runs have a position in common; a run ends where the next position is lower.
    Tokens that are not `valid` do not count. These are no restarts: repeats (0, 0, 1, 1), another
    order (5, 6, 0, 1), and padding on the left, as in Hugging Face's generate (1, 1, 1, 0, 1, 2).
    Nor is 0, 0, 1, 2: a first document of one token looks like two events at one time, or like
    padding. Positions are read only on the CPU and not while tracing, where this needs no
    synchronisation.
    """
    if isinstance(positions, range) or not _is_readable(positions):
        return False
    if valid is not None and not _is_readable(valid):
        return False
    if not (positions[..., 1:] < positions[..., :-1]).any():
        return False
    if valid is not None:
        # An invalid token takes the position of the last valid one, or else of the first.
        first_valid = valid.int().argmax(-1, keepdim=True)
        index = torch.arange(positions.shape[-1]).where(valid, first_valid)
        positions = positions.expand(index.shape).gather(-1, index.cummax(-1).values)
    # Number the runs in which positions do not fall: 0, 1, 2, 0, 1 has runs 0, 0, 0, 1, 1.
    is_fall = torch.zeros_like(positions, dtype=torch.bool)
    is_fall[..., 1:] = positions[..., 1:] < positions[..., :-1]
    run_number = is_fall.cumsum(-1)
    # A first run with one position only may be padding on the left: 1, 1, 1, 0, 1, 2.
    is_rise_in_first_run = (run_number == 0) & (positions != positions[..., :1])
    may_begin_with_padding = ~is_rise_in_first_run.any(-1, keepdim=True)
    # After sorting, equal positions are adjacent; the sort is stable, so their runs are in order.
    sorted_positions, index = positions.sort(dim=-1, stable=True)
    run_of_sorted = run_number.gather(-1, index)
    run = run_of_sorted[..., 1:]
    previous_run = run_of_sorted[..., :-1]
    is_repeated = (sorted_positions[..., 1:] == sorted_positions[..., :-1]) & (run != previous_run)
    is_padding = may_begin_with_padding & (previous_run == 0) & (run == 1)
    return bool((is_repeated & ~is_padding).any())


def first_text_returns(
    positions: Real[Tensor, "*#batch len axes"], valid: Bool[Tensor, "*#rows len"] | None = None
) -> bool:
    """Return True if positions of several components are known to return to the text that begins
    their row, as in packed documents of M-RoPE.

    Tokens of a text have the same number on all axes, one more for each token. So a row begins with
    a text if its first two tokens are (p, p, p) and (p + 1, p + 1, p + 1), and returns to it if
    these two follow one another again. Grids have no such pair, row by row or column by column, and
    may repeat their places. Tokens that are not `valid` do not count. Positions are read only on
    the CPU and not while tracing.
    """
    if not _is_readable(positions):  # first: while tracing, the length must stay any length
        return False
    if positions.shape[-2] < 4:
        return False
    if valid is not None and not _is_readable(valid):
        return False
    first_component = positions[..., 0]
    is_in_text = (positions == first_component[..., None]).all(-1)
    if valid is not None:
        is_in_text = is_in_text & valid
        first_component = first_component.expand(is_in_text.shape)
    # True where a token and the next one are two successive tokens of a text.
    is_text_pair = (
        is_in_text[..., 1:]
        & is_in_text[..., :-1]
        & (first_component[..., 1:] == first_component[..., :-1] + 1)
    )
    first_component = first_component[..., :-1]
    first_token_index = torch.zeros_like(first_component[..., :1], dtype=torch.long)
    if valid is not None:
        first_token_index = (
            valid[..., :-1].int().argmax(-1, keepdim=True).expand(first_token_index.shape)
        )
    begins_with_text = is_text_pair.gather(-1, first_token_index)
    equals_first_pair = is_text_pair & (
        first_component == first_component.gather(-1, first_token_index)
    )
    return bool((begins_with_text[..., 0] & (equals_first_pair.sum(-1) > 1)).any())


def last_positions_differ(
    q_positions: Real[Tensor, "*#batch q_len axes"],
    kv_positions: Real[Tensor, "*#batch kv_len axes"],
) -> bool:
    """Return True if the last queries are known to have other positions than the last keys, as many
    as there are of both. Positions are read only on the CPU and not while tracing; all tokens
    without a place on a grid (NaN) count as equal."""
    if q_positions is kv_positions or not (
        _is_readable(q_positions) and _is_readable(kv_positions)
    ):
        return False
    count = min(q_positions.shape[-2], kv_positions.shape[-2])
    last_q_positions = q_positions[..., q_positions.shape[-2] - count :, :]
    last_kv_positions = kv_positions[..., kv_positions.shape[-2] - count :, :]
    return not bool(
        (
            (last_q_positions == last_kv_positions)
            | (last_q_positions.isnan() & last_kv_positions.isnan())
        ).all()
    )


def repeated_position(cached: AnyPositions, new: AnyPositions) -> int | float | None:
    """Return a position that both a new token and a cached token of its batch row have. Return None
    if there is none, or if positions are not known without waiting for a device.

    cached, new: positions, (len) or (rows, len), or a range; one row serves all rows of the other.
    """
    if isinstance(cached, range) and isinstance(new, range):
        positions_in_both = range(max(cached.start, new.start), min(cached.stop, new.stop))
        return positions_in_both.start if len(positions_in_both) else None
    if torch.compiler.is_compiling():
        return None
    cached = as_tensor(cached)
    new = as_tensor(new)
    if not (_is_readable(cached) and _is_readable(new)) or not cached.numel() or not new.numel():
        return None
    cached_rows = cached[None] if cached.ndim == 1 else cached
    new_rows = new[None] if new.ndim == 1 else new
    if bool((new_rows.amin(-1) > cached_rows.amax(-1)).all()):  # as nearly always
        return None
    return _first_repeated_position(cached_rows, new_rows)


def _first_repeated_position(cached: Tensor, new: Tensor) -> int | float | None:
    """Return a position of `new` (rows or 1, new_len) that the same row of `cached` has, too; None
    if there is none."""
    num_rows = max(len(cached), len(new))
    for cached_row, new_row in zip(
        cached.expand(num_rows, -1), new.expand(num_rows, -1), strict=True
    ):
        repeated = new_row[torch.isin(new_row, cached_row)]
        if repeated.numel():
            return repeated[0].item()
    return None


def _is_readable(positions: Tensor) -> bool:
    """Return True if reading positions neither waits for a device nor breaks a trace."""
    is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return type(positions) is Tensor and positions.device.type == "cpu" and not is_traced


def are_known_equal(a: AnyPositions, b: AnyPositions) -> bool:
    """Return True if both positions are known to be equal without waiting for a device: on the CPU
    by value, elsewhere only if they are one tensor or equal ranges."""
    if a is b:
        return True
    if isinstance(a, range) and isinstance(b, range):
        return a == b
    if torch.compiler.is_compiling():
        return False
    if isinstance(a, range):
        return len(a) > 0 and as_range(b) == a
    if isinstance(b, range):
        return len(b) > 0 and as_range(a) == b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return _is_readable(a) and _is_readable(b) and _all_equal(a, b)


def _all_equal(a: Tensor, b: Tensor) -> bool:
    """Return True if all positions of the two tensors are equal; NaN, which marks tokens without a
    place, equals NaN."""
    if a.is_floating_point():
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a, b)


class RememberedPositions:
    """Remember the positions for which a result was computed, to compare them with others.

    A range, and a copy of a tensor on the CPU, are compared by value. A tensor on another device is
    not remembered: comparing it would wait for the device, and it may have been changed since. In a
    trace, positions fit if they are the same tensor.
    """

    def __init__(self, positions: AnyPositions) -> None:
        self._positions: AnyPositions | None = positions
        if isinstance(positions, Tensor) and not torch.compiler.is_compiling():
            self._positions = positions.clone() if _is_readable(positions) else None

    def fits(self, positions: AnyPositions) -> bool:
        """Return True if the positions are known to equal the remembered ones."""
        return self._positions is not None and are_known_equal(positions, self._positions)


def distances(
    q_positions: FlatQueryPositions, kv_positions: FlatKeyPositions
) -> Real[Tensor, "*batch q_len kv_len"]:
    """Return q_position - kv_position, (..., q_len, kv_len); positive for the past.

    Raises: ValueError unless both are (len) or (batch, len).
    """
    check_flat_positions(q_positions, kv_positions)
    q_positions, kv_positions = _to_common_dtype(q_positions, kv_positions)
    return q_positions[..., :, None] - kv_positions[..., None, :]


def subtract_first_key(
    q_positions: FlatQueryPositions, kv_positions: FlatKeyPositions
) -> tuple[Float[Tensor, "*#batch q_len"], Float[Tensor, "*#batch kv_len"]]:
    """Return both in float64, minus the position of the first key of their batch row, so that far
    positions stay distinct. Distances do not change.

    Whole positions are subtracted as whole numbers. The results are exact if they are below 2^53:
    rows may lie anywhere, but one row must not span more.
    """
    q_positions, kv_positions = _to_common_dtype(q_positions, kv_positions)
    if kv_positions.shape[-1]:
        origin = kv_positions[..., :1]
        q_positions = q_positions - origin
        kv_positions = kv_positions - origin
    return q_positions.double(), kv_positions.double()


def _to_common_dtype(q_positions: Tensor, kv_positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return both positions in float64 if one has whole numbers and the other real ones; otherwise
    unchanged. torch would round whole numbers to the dtype of the real ones."""
    if q_positions.is_floating_point() == kv_positions.is_floating_point():
        return q_positions, kv_positions
    return q_positions.double(), kv_positions.double()


def check_flat_positions(q_positions: Any, kv_positions: Any) -> None:
    """Raise ValueError unless both are tensors (len) or (batch, len); the message says that q and k
    are no positions."""
    for name, positions in (("q_positions", q_positions), ("kv_positions", kv_positions)):
        if positions.ndim not in (1, 2):
            raise ValueError(
                f"{name} must have shape (len) or (batch, len), got {tuple(positions.shape)}. "
                "For attention with q and k use posenc.attention(q, k, v, encoding, ...)."
            )


def check_tensor(caller: str, name: str, value: Any, contents: str) -> None:
    """Raise TypeError unless `value` is a tensor.

    caller, name: the function and its argument, for the message. contents: what the tensor has for
    each token, such as "document ids", for the message.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{caller}: {name} must be a tensor of {contents}, got {type(value).__name__}. "
            "torch.tensor(...) makes one of a list."
        )


def check_valid(caller: str, valid: Any) -> None:
    """Raise TypeError unless `valid` is a tensor. Raise ValueError if it is known to have negative
    numbers, as a mask that is added to scores has, in which 0 marks the valid tokens. It is read
    only on the CPU and not while tracing."""
    check_tensor(caller, "valid", valid, "booleans, True for tokens that are no padding")
    if valid.dtype == torch.bool or not _is_readable(valid):
        return
    if valid.is_complex() or not bool((valid >= 0).all()):
        raise ValueError(
            f"{caller}: valid must be booleans, or 1 for tokens and 0 for padding; got negative "
            "numbers or NaN, as in a mask that is added to scores, where 0 marks tokens. "
            "Give mask == 0."
        )


@explain_misfits
def positions_from_mask(
    valid: Shaped[Tensor, "*batch len"], *, start: int = 0
) -> Int[Tensor, "*batch len"]:
    """Return positions that number the tokens of each row and skip padding on either side.

    Args:
        valid: (batch, len), True or nonzero for tokens that are no padding: Hugging Face's
            attention_mask.
        start: position of the first token. RoBERTa and fairseq use padding_idx + 1.

    Shapes: (batch, len) -> the same, int64. Padding gets start - 1, or 0 where that is negative.
    Raises: TypeError for anything but a tensor; ValueError for numbers below 0, as in a mask that
    is added to scores (give mask == 0).
    """
    check_valid("positions_from_mask", valid)
    check_count("positions_from_mask", "start", start, 1 - FARTHEST_POSITION, FARTHEST_POSITION - 1)
    valid = valid.bool()
    positions = valid.long().cumsum(-1) + (start - 1)
    return positions.masked_fill(~valid, max(start - 1, 0))


@explain_misfits
def positions_from_documents(documents: Shaped[Tensor, "*batch len"]) -> Documents:
    """Return positions that begin at 0 with each document of a packed sequence.

    Args:
        documents: ids (len) or (batch, len); contiguous equal ids are one document.

    Shapes: like `documents`, int64.
    Raises: TypeError for anything but a tensor.
    """
    check_tensor("positions_from_documents", "documents", documents, "document ids")
    index = torch.arange(documents.shape[-1], device=documents.device)
    begins_document = torch.ones_like(documents, dtype=torch.bool)
    begins_document[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return index - (index * begins_document).cummax(-1).values


@explain_misfits
def documents_from_positions(positions: Documents) -> Documents:
    """Return document ids 0, 1, ... of a packed sequence. A new document begins at each token whose
    position is not one more than that of the token before.

    Shapes: integer positions (len) or (batch, len) -> the same.
    Raises: TypeError for anything but a tensor.
    """
    check_tensor("documents_from_positions", "positions", positions, "positions")
    begins_document = torch.zeros_like(positions)
    begins_document[..., 1:] = positions[..., 1:] != positions[..., :-1] + 1
    return begins_document.cumsum(-1)
