"""Measure a module's errors: in radians, in logits by row, or in fractions of a row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.inspect.module.view import Kind

QUERIES = 16
"""Rows of a bias that are checked, spread over all."""


@dataclass(frozen=True)
class Error:
    """The error of each position, in the units of `bound`; `said` describes the largest."""

    by_row: Tensor
    said: str

    @property
    def worst(self) -> float:
        """Return the largest error; NaN if any is NaN."""
        return self.by_row.max().item()


def bound(dtype: torch.dtype) -> float:
    """Return the error allowed in `dtype`: a few roundings of elements of size one."""
    return 4 * torch.finfo(dtype).eps


def error(kind: Kind, got: Tensor, want: Tensor) -> Error:
    """Return the error: for rotations, angles in radians and relative lengths; for values, relative
    to their row's largest.

    For biases it is |got - want| / (1 + |want|), both relative to the row's largest, because a
    softmax sees only differences within a row, and far smaller logits have no weight.
    """
    if got.shape != want.shape:
        raise ValueError(f"shapes {tuple(got.shape)} and {tuple(want.shape)}")
    if kind == "rotation":
        angle = (got * want.conj()).angle().abs()
        by_row = torch.maximum(angle, (got.abs() / want.abs()).log().abs()).amax(-1)
        return Error(by_row, f"{by_row.max():.2g} rad")
    if kind == "bias":
        return _of_bias(got, want)
    scale = want.abs().amax(-1).clamp(min=1e-30)
    by_row = (got - want).abs().amax(-1) / scale
    return Error(by_row, f"{by_row.max():.2g} of a row's largest")


def below_largest(bias: Tensor, queries: Tensor, later: float = 0.0) -> Tensor:
    """Return the bias of past keys minus the row's largest, (heads, queries, keys); `later`
    beyond."""
    keys = torch.arange(bias.shape[-1])
    shown = bias.expand(-1, len(queries), -1) if bias.shape[1] == 1 else bias[:, queries]
    past = (keys <= queries[:, None]) & shown.isfinite()
    hidden = shown.masked_fill(~past, -torch.inf)
    return (hidden - hidden.amax(-1, keepdim=True)).masked_fill(~past, later)


def _of_bias(got: Tensor, want: Tensor) -> Error:
    """Return the error of a bias, see `error`, and how far it moves weights of a softmax."""
    keys = want.shape[-1]  # queries are spread over all, the last among them
    queries = torch.linspace(keys - 1, max(1, keys // QUERIES), QUERIES).long().unique()
    if got.isnan().any():
        return Error(torch.full((len(queries),), torch.nan), "NaN")
    inexact, exact = below_largest(got, queries), below_largest(want, queries)
    logits = (inexact - exact).abs()
    shares = logits / (1 + exact.abs())
    weights = [below_largest(b, queries, -torch.inf).softmax(-1) for b in (got, want)]
    moved = (weights[0] - weights[1]).abs().sum(-1).max() / 2
    worst = logits.flatten()[shares.argmax()]
    return Error(shares.amax((0, 2)), f"{worst:.2g} logits within a row, weights by {moved:.2g}")


def in_head(errors: Tensor) -> str:
    """Return in which head the largest error is; "" if there is one head. errors: (..., heads,
    pairs)."""
    heads = errors.movedim(-2, 0).flatten(1).amax(-1)
    return f" in head {int(heads.argmax())} of {len(heads)}" if len(heads) > 1 else ""


def distinct(kind: Kind, seen: Tensor, dtype: torch.dtype | None = None) -> tuple[int, int]:
    """Count the different values that positions have (of a bias: distances, in the head with most),
    and the positions. dtype: compare after rounding to it."""
    if kind == "bias":
        row = seen[:, -1]
        row = row if dtype is None else row.to(dtype)
        return max(len(head.unique()) for head in row), seen.shape[-1]
    parts = torch.view_as_real(seen).flatten(1) if seen.is_complex() else seen
    parts = parts if dtype is None else parts.to(dtype)
    return len(parts.unique(dim=0)), len(parts)
