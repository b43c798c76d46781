"""Find the tensors and the axes of positions in a module's result, and compare two results."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

ResultKind = Literal["rotation", "bias", "values"]
"""What results are read as, which decides how they are compared."""

_HIDDEN_BELOW = -1e4
"""Logits that hide a key: less than any slope gives at the lengths of the checks."""
_NUM_CHECKED_ROWS = 16
"""Rows of a bias that are checked, spread over all."""


def floating_tensors(result: Any) -> list[Tensor]:
    """Return every floating or complex tensor with two axes or more in a module's result, which may
    nest tuples, lists, mappings and dataclasses."""
    if isinstance(result, Tensor):
        is_inexact = result.is_floating_point() or result.is_complex()
        return [result.detach()] if is_inexact and result.ndim >= 2 else []
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = vars(result)
    if isinstance(result, Mapping):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in floating_tensors(part)]
    return []


def position_axes(short: Tensor, long: Tensor, counts: tuple[int, int]) -> tuple[int, ...]:
    """Return the axes, as negative numbers, that grow with the number of positions: those whose
    size is counts[0] in `short` and counts[1] in `long`. () if the two differ in their number of
    axes.

    Shapes (1, 4, 8) and (1, 6, 8) with counts (4, 6) -> (-2,).
    """
    if short.ndim != long.ndim:
        return ()
    return tuple(
        axis for axis in range(-short.ndim, 0) if (short.shape[axis], long.shape[axis]) == counts
    )


def rows_by_position(tensor: Tensor, axis: int) -> Tensor:
    """Reshape a tensor, of a batch of one, to (positions, features): `axis` comes first, and all
    others are flattened."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(len(moved), -1)


def channels_by_position(tensor: Tensor, axis: int) -> Tensor:
    """Reshape a tensor in the shape of queries, of a batch of one, to (positions, heads, channels):
    `axis` is that of positions."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(len(moved), -1, moved.shape[-1])


def bias_matrix(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Reorder a tensor whose axes of positions are `axes` to (heads, queries, keys); with one
    such axis every query gets the same row of keys."""
    if len(axes) == 1:
        moved = tensor.movedim(axes[0], -1)
        return moved.reshape(-1, 1, moved.shape[-1])
    moved = tensor.movedim(axes[-2:], (-2, -1))
    return moved.reshape(-1, *moved.shape[-2:])


def is_hidden(bias: Tensor) -> Tensor:
    """Return True for each key that a bias hides, by minus infinity or a very negative number."""
    return bias <= _HIDDEN_BELOW


def hidden_past_keys(bias: Tensor) -> Tensor:
    """Return True for each key, not after its query, that a bias (heads, queries, keys) hides. Its
    last query is at the last key."""
    num_queries, num_keys = bias.shape[-2:]
    return is_hidden(bias).tril(num_keys - num_queries)


def to_double_precision(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 or complex128, so that subtracting adds no error of its own."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def absolute_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| element by element. Equal infinities (hidden keys) give 0; NaN stays NaN."""
    a = to_double_precision(a)
    b = to_double_precision(b)
    return torch.where(a == b, 0.0, (a - b).abs())


def largest_magnitude(a: Tensor) -> float:
    """Return the largest finite magnitude in a tensor; 0 if it has no finite number."""
    magnitudes = to_double_precision(a).abs()
    finite_magnitudes = magnitudes[magnitudes.isfinite()]
    return finite_magnitudes.max().item() if len(finite_magnitudes) else 0.0


def are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return True if a and b have one shape and differ nowhere by more than `tolerance` times the
    largest magnitude in b; False if either has NaN."""
    if a.shape != b.shape:
        return False
    allowed = tolerance * max(largest_magnitude(b), 1e-30)
    return bool((absolute_difference(a, b) <= allowed).all())


@dataclass(frozen=True)
class RowErrors:
    """The error of each position, or of each query of a bias, in the units of `measure_errors`.

    description: the largest error in words, "0.004 rad".
    """

    by_row: Tensor
    description: str

    @property
    def worst(self) -> float:
        """Return the largest error; NaN if any is NaN."""
        return self.by_row.max().item()


def allowed_error(dtype: torch.dtype) -> float:
    """Return the error allowed in `dtype`: a few roundings of elements of size one."""
    # Four roundings: chosen, not derived.
    return 4 * torch.finfo(dtype).eps


def measure_errors(kind: ResultKind, actual: Tensor, expected: Tensor) -> RowErrors:
    """Return the error of each position of `actual`. For rotations it is the larger of the angle in
    radians and the logarithm of the ratio of lengths, for values the difference relative to the
    largest of the row in `expected`.

    For biases it is |actual - expected| / (1 + |expected|), both relative to the row's largest,
    because a softmax sees only differences within a row, and far smaller logits have no weight.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
    if kind == "rotation":
        angles = (actual * expected.conj()).angle().abs()
        by_row = torch.maximum(angles, (actual.abs() / expected.abs()).log().abs()).amax(-1)
        return RowErrors(by_row, f"{by_row.max():.2g} rad")
    if kind == "bias":
        return _bias_error(actual, expected)
    largest_in_row = expected.abs().amax(-1).clamp(min=1e-30)  # a row may be all zeros
    by_row = (actual - expected).abs().amax(-1) / largest_in_row
    return RowErrors(by_row, f"{by_row.max():.2g} of a row's largest")


def bias_minus_largest(bias: Tensor, query_indices: Tensor, fill: float = 0.0) -> Tensor:
    """Return the bias of keys up to each query minus the largest in its row, (heads, queries,
    keys).

    bias: (heads, queries, keys), or (heads, 1, keys) with one row for all queries. query_indices:
    the rows to return. fill: the value for later keys, and for those that the bias hides.
    """
    key_indices = torch.arange(bias.shape[-1])
    rows = bias.expand(-1, len(query_indices), -1) if bias.shape[1] == 1 else bias[:, query_indices]
    is_past = (key_indices <= query_indices[:, None]) & rows.isfinite()
    past_rows = rows.masked_fill(~is_past, -torch.inf)
    return (past_rows - past_rows.amax(-1, keepdim=True)).masked_fill(~is_past, fill)


def _bias_error(actual: Tensor, expected: Tensor) -> RowErrors:
    """Return the errors of a bias as `measure_errors` defines them; the description adds how far
    they move the weights of a softmax, at most."""
    num_keys = expected.shape[-1]  # queries are spread over all, the last among them
    query_indices = (
        torch.linspace(num_keys - 1, max(1, num_keys // _NUM_CHECKED_ROWS), _NUM_CHECKED_ROWS)
        .long()
        .unique()
    )
    if actual.isnan().any():
        return RowErrors(torch.full((len(query_indices),), torch.nan), "NaN")
    actual_rows = bias_minus_largest(actual, query_indices)
    expected_rows = bias_minus_largest(expected, query_indices)
    differences = (actual_rows - expected_rows).abs()
    relative_errors = differences / (1 + expected_rows.abs())
    weights = [
        bias_minus_largest(b, query_indices, -torch.inf).softmax(-1) for b in (actual, expected)
    ]
    moved_weight = (weights[0] - weights[1]).abs().sum(-1).max() / 2
    worst_difference = differences.flatten()[relative_errors.argmax()]
    return RowErrors(
        relative_errors.amax((0, 2)),
        f"{worst_difference:.2g} logits within a row, weights by {moved_weight:.2g}",
    )


def num_distinct_values(rows: Tensor) -> int:
    """Return how many different numbers the bias of one query has, in the head with the most.

    rows: (heads, keys).
    """
    return max(len(head.unique()) for head in rows)


def worst_head_in_words(errors: Tensor) -> str:
    """Return the head with the largest error as text: " in head 2 of 8", counted from 0; "" if
    there is one head.

    errors: (..., heads, pairs).
    """
    error_by_head = errors.movedim(-2, 0).flatten(1).amax(-1)
    return (
        f" in head {int(error_by_head.argmax())} of {len(error_by_head)}"
        if len(error_by_head) > 1
        else ""
    )


def count_distinct(
    kind: ResultKind, result: Tensor, dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """Return how many different results the positions have, and how many positions there are.

    (1000, 1024): 24 of 1,024 positions repeat the result of another one. Of a bias, the logits of
    the last query are counted, in the head in which most of them differ, one for each distance.

    result: what ResultReader.read returns. dtype: compare after rounding to it.
    """
    if kind == "bias":
        last_rows = result[:, -1]
        last_rows = last_rows if dtype is None else last_rows.to(dtype)
        return max(len(head_row.unique()) for head_row in last_rows), result.shape[-1]
    rows = torch.view_as_real(result).flatten(1) if result.is_complex() else result
    rows = rows if dtype is None else rows.to(dtype)
    return len(rows.unique(dim=0)), len(rows)
