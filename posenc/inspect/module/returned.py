"""Read a module's result as tensors, and find which of their axes are positions."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def tensors(returned: Any) -> list[Tensor]:
    """Return every floating or complex tensor with two axes or more in a module's result."""
    if isinstance(returned, Tensor):
        numbers = returned.is_floating_point() or returned.is_complex()
        return [returned.detach()] if numbers and returned.ndim >= 2 else []
    if dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        returned = vars(returned)
    if isinstance(returned, Mapping):
        returned = list(returned.values())
    if isinstance(returned, (tuple, list)):
        return [tensor for part in returned for tensor in tensors(part)]
    return []


def position_axes(short: Tensor, long: Tensor, counts: tuple[int, int]) -> tuple[int, ...]:
    """Return the axes, counted from the last, whose sizes are the two counts of positions."""
    if short.ndim != long.ndim:
        return ()
    return tuple(
        axis for axis in range(-short.ndim, 0) if (short.shape[axis], long.shape[axis]) == counts
    )


def rows(tensor: Tensor, axis: int) -> Tensor:
    """Return (positions, features) of the batch's first row; the features of all heads."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(len(moved), -1)


def channels(tensor: Tensor, axis: int) -> Tensor:
    """Return (positions, heads, channels), for results in the shape of queries."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(len(moved), -1, moved.shape[-1])


def matrix(tensor: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Reorder a tensor whose axes of positions are `axes` to (heads, queries, keys); with one
    such axis every query gets the same row of keys."""
    if len(axes) == 1:
        moved = tensor.movedim(axes[0], -1)
        return moved.reshape(-1, 1, moved.shape[-1])
    moved = tensor.movedim(axes[-2:], (-2, -1))
    return moved.reshape(-1, *moved.shape[-2:])


def wide(tensor: Tensor) -> Tensor:
    """Convert to float64 or complex128, where differences are exact."""
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def gap(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|. Equal infinities (hidden keys) give 0; NaN stays NaN."""
    a, b = wide(a), wide(b)
    return torch.where(a == b, 0.0, (a - b).abs())


def size(a: Tensor) -> float:
    """Return the largest finite magnitude."""
    finite = wide(a).abs()[torch.isfinite(wide(a).abs())]
    return finite.max().item() if len(finite) else 0.0


def same(a: Tensor, b: Tensor, close: float) -> bool:
    """Return True if a and b differ by less than `close` of the largest magnitude; NaN never is the
    same."""
    return a.shape == b.shape and bool((gap(a, b) <= close * max(size(b), 1e-30)).all())
