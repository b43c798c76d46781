"""Read what a module returns: as a rotation, as a bias, or as values by position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posenc.inspect.module.inputs import Inputs
from posenc.inspect.module.returned import channels, matrix, rows, same, tensors, wide

Kind = Literal["rotation", "bias", "values"]
How = Literal["turned content", "cos and sin", "sinusoids", "angles", "complex", "bias", "values"]
Run = Callable[[Inputs], Any]
Pairs = tuple[tuple[int, int], ...]

CLOSE = 1e-4
"""Smaller relative differences are rounding of float32 sums and sines."""


class Unfit(ValueError):
    """The reason why one way to call a module shows nothing about positions."""


@dataclass(frozen=True)
class View:
    """A reading of a module's result. kind: rotation (angles and lengths of pairs of channels),
    bias (logits by query and key) or values. how: the meaning of the numbers. axes: axes of each
    tensor that is read. pairs: channels that rotate together; of values, those of queries if keys
    have others. probe: the content that shows positions best; None: random.
    """

    kind: Kind
    how: How
    axes: dict[int, tuple[int, ...]]
    pairs: Pairs = ()
    probe: Tensor | None = None

    def read(self, returned: Any, batch: int = 1, row: int = 0) -> Tensor:
        """Return (positions, pairs) complex, (heads, queries, keys) or (positions, features), in
        float64.

        `row`: of the batch."""
        if self.how == "turned content":
            return torch.cat(self.sides(returned, batch, row), -1)
        parts = self._parts(returned, batch, row)
        axes = list(self.axes.values())
        match self.how:
            case "bias":
                return wide(matrix(parts[0], axes[0]))
            case "cos and sin" if len(parts) == 1:
                turned = wide(parts[0]).movedim(axes[0][0], 0)
                return torch.complex(turned[..., 0], turned[..., 1]).reshape(len(turned), -1)
            case "cos and sin":
                cos, sin = (wide(rows(p, a[0])) for p, a in zip(parts, axes, strict=True))
                return torch.complex(cos, sin)
            case "sinusoids":
                table = wide(rows(parts[0], axes[0][0]))
                first, second = (list(side) for side in zip(*self.pairs, strict=True))
                return torch.complex(table[:, first], table[:, second])
            case "complex":
                return wide(rows(parts[0], axes[0][0]))
            case "angles":
                lengths = wide(rows(parts[1], axes[1][0])) if len(parts) > 1 else 1.0
                angle = wide(rows(parts[0], axes[0][0]))
                return torch.polar(torch.ones_like(angle), angle) * lengths
        every = [rows(part, a[0]) for part, a in zip(parts, axes, strict=True)]
        return wide(torch.cat(every, -1))

    def sides(self, returned: Any, batch: int = 1, row: int = 0) -> list[Tensor]:
        """Return the rotated queries, and rotated keys if they are returned too: (positions, pairs)
        complex."""
        first, second = (list(side) for side in zip(*self.pairs, strict=True))
        parts = zip(self._parts(returned, batch, row), self.axes.values(), strict=True)
        turned = [wide(channels(part, axis[0])) for part, axis in parts]
        return [torch.complex(side[:, first], side[:, second]) for side in turned]

    def _parts(self, returned: Any, batch: int, row: int) -> list[Tensor]:
        found = tensors(returned)
        parts = [found[index] for index in self.axes]
        if batch > 1:
            parts = [part[row][None] if len(part) == batch else part for part in parts]
        return parts


def find_view(run: Run, width: int, axes: Sequence[tuple[int, ...]]) -> View:
    """Find how to read the tensors whose position axes are `axes` (empty: not read)."""
    by_index = {index: found for index, found in enumerate(axes) if found}
    for index, found in by_index.items():
        if len(found) >= 2:
            return View("bias", "bias", {index: found})
    count = 11

    def seen(probe: Tensor | None = None) -> list[Tensor]:
        parts = tensors(run(Inputs(torch.arange(count), width, probe=probe)))
        return [parts[index] for index in by_index]

    parts, first_axes = seen(), list(by_index.values())
    (axis,), first = first_axes[0], parts[0]
    if axis == -1 and (first.ndim == 2 or first.shape[-2] == 1):
        return View("bias", "bias", dict(list(by_index.items())[:1]))
    if first.is_complex():
        return View("rotation", "complex", dict(list(by_index.items())[:1]))
    nothing = seen(torch.zeros(width))
    if all(_same(a, b) for a, b in zip(parts, nothing, strict=True)):  # content plays no part
        return _of_tables(parts, by_index)
    if all(not part.any() for part in nothing) and first.shape[-1] == width:
        pairs, *others = turning_pairs(run, width, by_index)
        if pairs and all(each == pairs for each in others):
            probe = torch.zeros(width)
            probe[[i for i, _ in pairs]] = 1
            return View("rotation", "turned content", by_index, pairs, probe)
        return View("values", "values", by_index, pairs if all(others) else ())
    both = zip(parts, nothing, first_axes, strict=True)
    gaps = [rows(with_content, x[0]) - rows(without, x[0]) for with_content, without, x in both]
    if not all(_same(gap, gap[:1].expand_as(gap)) for gap in gaps):
        return View("values", "values", by_index)
    found = _of_tables(nothing, by_index)  # the added values; a sum is no angle
    added = found if found.how == "sinusoids" else View("values", "values", by_index)
    return replace(added, probe=torch.zeros(width))


def _of_tables(parts: Sequence[Tensor], axes: dict[int, tuple[int, ...]]) -> View:
    tables = [wide(rows(part, axis[0])) for part, axis in zip(parts, axes.values(), strict=True)]
    first, widths = tables[0], [table.shape[-1] for table in tables]
    if len(tables) == 2 and _circles(*(table[:, : min(widths)] for table in tables)):
        if widths[0] != widths[1]:
            raise Unfit(f"returns cosines and sines of {widths[0]} and {widths[1]} channels")
        return View("rotation", "cos and sin", axes)
    for pairs in _layouts(first.shape[-1]):
        a, b = (first[:, list(side)] for side in zip(*pairs, strict=True))
        if len(tables) == 1 and _circles(a, b):
            return View("rotation", "sinusoids", axes, pairs)
    if parts[0].shape[-1] == 2 and parts[0].ndim > 2 and _circles(first[:, ::2], first[:, 1::2]):
        return View("rotation", "cos and sin", dict(list(axes.items())[:1]))
    steps = torch.arange(len(first), dtype=torch.float64)[:, None]
    if first.shape[-1] > 1 and first.any() and _same(first, steps * first[1:2]):
        return View("rotation", "angles", axes)
    return View("values", "values", axes)


def _layouts(width: int) -> tuple[Pairs, ...]:
    """Return the layouts in which sine and cosine of one angle may be: neighbours, or one in each
    half."""
    if width % 2 or not width:
        return ()
    half = width // 2
    neighbours = tuple((2 * i, 2 * i + 1) for i in range(half))
    return neighbours, tuple((i, i + half) for i in range(half))


def _circles(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b are the cosine and sine of the same angles, up to a factor."""
    if a.shape != b.shape:
        return False
    squares = a**2 + b**2
    return bool((squares > 0).all()) and _same(squares, squares[:1].expand_as(squares))


def turning_pairs(run: Run, width: int, axes: dict[int, tuple[int, ...]]) -> list[Pairs]:
    """Find the pairs of channels that rotate together in each tensor, from single channels given to
    the module. Empty if it mixes more than two, or is not linear."""
    inputs = Inputs(torch.arange(24), width)

    def last_row(content: Inputs) -> list[Tensor]:
        parts = tensors(run(content))
        return [channels(parts[i], a[0])[-1].double() for i, a in axes.items()]

    columns = [
        last_row(Inputs(inputs.positions, width, probe=torch.eye(width)[i])) for i in range(width)
    ]
    probe = torch.linspace(-1, 1, width)
    mixed = last_row(Inputs(inputs.positions, width, probe=probe))
    found: list[Pairs] = []
    for side, want in enumerate(mixed):
        turned = torch.stack([column[side] for column in columns], dim=-1)  # (out, in)
        if not _same(turned @ probe.double(), want):
            return [()]
        found.append(_partners(turned))
    return found


def _partners(turned: Tensor) -> Pairs:
    across = turned.abs().clone()
    across.fill_diagonal_(0)
    size, partner = across.max(0)
    pairs = tuple((i, int(j)) for i, j in enumerate(partner.tolist()) if size[i] > 1e-9 and i < j)
    for i, j in pairs:
        across[i, j] = across[j, i] = 0
    return pairs if pairs and across.max() <= CLOSE * turned.abs().max() else ()


def _same(a: Tensor, b: Tensor) -> bool:
    return same(a, b, CLOSE)
