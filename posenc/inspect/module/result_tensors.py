"""Read a module's result as tensors, and find which of their axes are positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
    finite = magnitudes[magnitudes.isfinite()]
    return finite.max().item() if len(finite) else 0.0


def are_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return True if a and b have one shape and differ nowhere by more than `tolerance` times the
    largest magnitude in b; False if either has NaN."""
    if a.shape != b.shape:
        return False
    allowed = tolerance * max(largest_magnitude(b), 1e-30)
    return bool((absolute_difference(a, b) <= allowed).all())
