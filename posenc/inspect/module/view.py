"""Read what a module returns: as a rotation, as a bias, or as values by position."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posenc.inspect.module.call import Form, Inputs
from posenc.inspect.module.returned import channels, matrix, rows, same, tensors, wide

Kind = Literal["rotation", "bias", "values"]
How = Literal["rotated content", "cos and sin", "sinusoids", "complex", "bias", "values"]
Run = Callable[[Inputs], Any]
Pairs = tuple[tuple[int, int], ...]
Axes = dict[int, tuple[int, ...]]

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
    axes: Axes
    pairs: Pairs = ()
    probe: Tensor | None = None

    def read(self, returned: Any, batch: int = 1, row: int = 0) -> Tensor:
        """Return (positions, pairs) complex, (heads, queries, keys) or (positions, features), in
        float64. Of rotated content the pairs are those of all heads of the queries, and then those
        of all heads of the keys.

        `row`: of the batch."""
        if self.how == "rotated content":
            return torch.cat([side.flatten(1) for side in self.sides(returned, batch, row)], -1)
        parts = self.parts(returned, batch, row)
        axes = list(self.axes.values())
        match self.how:
            case "bias":
                return wide(matrix(parts[0], axes[0]))
            case "cos and sin":
                cos, sin = (wide(rows(p, a[0])) for p, a in zip(parts, axes, strict=True))
                return torch.complex(cos, sin)
            case "sinusoids":
                table = wide(rows(parts[0], axes[0][0]))
                first, second = (list(side) for side in zip(*self.pairs, strict=True))
                return torch.complex(table[:, first], table[:, second])
            case "complex":
                return wide(rows(parts[0], axes[0][0]))
        all_rows = [rows(part, a[0]) for part, a in zip(parts, axes, strict=True)]
        return wide(torch.cat(all_rows, -1))

    def sides(self, returned: Any, batch: int = 1, row: int = 0) -> list[Tensor]:
        """Return the rotated queries, and rotated keys if they are returned too: (positions, heads,
        pairs) complex."""
        first, second = (list(side) for side in zip(*self.pairs, strict=True))
        rotated = self.channels(returned, batch, row)
        return [torch.complex(side[..., first], side[..., second]) for side in rotated]

    def by_head(self, seen: Tensor) -> Tensor:
        """Reshape what `read` returned of rotated content to (positions, sides, heads, pairs)."""
        return seen.reshape(len(seen), len(self.axes), -1, len(self.pairs))

    def channels(self, returned: Any, batch: int = 1, row: int = 0) -> list[Tensor]:
        """Return the rotated queries, and keys if they are returned too: (positions, heads,
        channels)."""
        parts = zip(self.parts(returned, batch, row), self.axes.values(), strict=True)
        return [wide(channels(part, axis[0])) for part, axis in parts]

    def parts(self, returned: Any, batch: int, row: int) -> list[Tensor]:
        """Return the tensors that are read, of one row of the batch."""
        returned_tensors = tensors(returned)
        parts = [returned_tensors[index] for index in self.axes]
        if batch > 1:
            parts = [part[row][None] if len(part) == batch else part for part in parts]
        return parts


def find_view(run: Run, way: str, form: Form, width: int, axes: list[tuple[int, ...]]) -> View:
    """Find how to read the tensors whose position axes are `axes` (empty: not read).

    Raises: Unfit where it is not what the way must return.
    """
    by_index = {index: part_axes for index, part_axes in enumerate(axes) if part_axes}
    match way:
        case "cos-sin":
            return _of_cos_sin(run, width, by_index)
        case "rotate":
            return _of_rotated(run, form, width, by_index)
        case "bias" | "scores":
            return _of_bias(by_index)
    return _of_added(run, width, by_index)


def _of_bias(axes: Axes) -> View:
    """Read the first tensor that has a number for each query and key, or one row of keys for all
    queries."""
    for index, part_axes in axes.items():
        is_same_row_for_every_query = part_axes == (-1,)
        if len(part_axes) > 1 or is_same_row_for_every_query:
            return View("bias", "bias", {index: part_axes})
    raise Unfit("returns nothing by query and key, and no row by key")


def _of_cos_sin(run: Run, width: int, axes: Axes) -> View:
    """Read cosines and sines, two real tensors or one complex one, that no content changes."""
    parts = tensors(run(Inputs(torch.arange(11), width)))
    tables = [parts[index] for index in axes]
    others = tensors(run(Inputs(torch.arange(11), width, probe=torch.zeros(width))))
    if not all(_same(part, others[index]) for part, index in zip(tables, axes, strict=True)):
        raise Unfit("what it returns depends on the content of x, and not on positions only")
    if tables[0].is_complex():
        return View("rotation", "complex", dict(list(axes.items())[:1]))
    if len(tables) != 2:
        raise Unfit(f"returns {len(tables)} real tensors by position, and not cosines and sines")
    widths = [
        rows(part, axis[0]).shape[-1] for part, axis in zip(tables, axes.values(), strict=True)
    ]
    if widths[0] != widths[1]:
        raise Unfit(f"returns cosines and sines of {widths[0]} and {widths[1]} channels")
    return View("rotation", "cos and sin", axes)


def _of_rotated(run: Run, form: Form, width: int, axes: Axes) -> View:
    """Read rotated queries, keys or x: as a rotation if no two pairs share a channel, else as
    values."""
    content = len(form.words & {"x", "q", "k"})
    parts = tensors(run(Inputs(torch.arange(11), width)))
    rotated = [parts[index] for index in axes]
    if len(rotated) != content or any(part.shape[-1] != width for part in rotated):
        shapes = ", ".join(str(tuple(part.shape)) for part in rotated)
        raise Unfit(f"returns {shapes}, and not {content} tensors in the shape of what it is given")
    sides = turning_pairs(run, width, axes)
    if sides is None:
        return View("values", "values", axes)
    pairs_of_all = _all_pairs(sides)
    if pairs_of_all and not _share_channels(pairs_of_all):
        probe = torch.zeros(width)  # heads, or a side, may leave some of these pairs as they are
        probe[[i for i, _ in pairs_of_all]] = 1
        return View("rotation", "rotated content", axes, pairs_of_all, probe)
    alike = all(heads == sides[0] for heads in sides)
    return View("values", "values", axes, () if alike else pairs_of_all)


def _all_pairs(sides: list[list[Pairs]]) -> Pairs:
    """Return each pair that any head of any side rotates, once and in order."""
    pairs: set[tuple[int, int]] = set()
    for heads in sides:
        pairs.update(*heads)
    return tuple(sorted(pairs))


def _share_channels(pairs: Pairs) -> bool:
    """Return True if any channel is in two pairs."""
    members = [channel for pair in pairs for channel in pair]
    return len(set(members)) < len(members)


def _of_added(run: Run, width: int, axes: Axes) -> View:
    """Read what is added to x: as sinusoids or values, or as values if content changes it."""
    if any(len(part_axes) > 1 for part_axes in axes.values()):
        raise Unfit("returns something for each pair of positions, and not for each position")

    def see(probe: Tensor | None = None) -> list[Tensor]:
        parts = tensors(run(Inputs(torch.arange(11), width, probe=probe)))
        return [parts[index] for index in axes]

    parts = see()
    nothing = see(torch.zeros(width))
    if all(_same(a, b) for a, b in zip(parts, nothing, strict=True)):  # content plays no part
        return _of_tables(parts, axes)
    if all(map(_adds_same_content, parts, nothing, axes.values())):
        return replace(_of_tables(nothing, axes), probe=torch.zeros(width))
    if not any(part.any() for part in nothing):  # as of a rotation
        raise Unfit("what it returns is not its input with a row added for each position")
    return View("values", "values", axes)  # as where a norm follows


def _adds_same_content(with_content: Tensor, without: Tensor, axes: tuple[int, ...]) -> bool:
    """Return True if the content of equal tokens changes the row of each position alike."""
    gap = rows(with_content, axes[0]) - rows(without, axes[0])
    return _same(gap, gap[:1].expand_as(gap))


def _of_tables(parts: list[Tensor], axes: Axes) -> View:
    """Read a table as sinusoids if its channels are sines and cosines in pairs, else as values."""
    first = parts[0]
    axis = next(iter(axes.values()))
    table = wide(rows(first, axis[0]))
    for pairs in _layouts(table.shape[-1]) if len(parts) == 1 else ():
        a, b = (table[:, list(side)] for side in zip(*pairs, strict=True))
        if _circles(a, b):
            return View("rotation", "sinusoids", axes, pairs)
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
    squares = a**2 + b**2
    return bool((squares > 0).all()) and _same(squares, squares[:1].expand_as(squares))


def turning_pairs(run: Run, width: int, axes: Axes) -> list[list[Pairs]] | None:
    """Find the pairs of channels that rotate together in each head of each tensor, from single
    channels given to the module. None if a head mixes more than two, or is not linear."""
    inputs = Inputs(torch.arange(24), width)

    def last_row(content: Inputs) -> list[Tensor]:
        parts = tensors(run(content))
        return [channels(parts[i], a[0])[-1].double() for i, a in axes.items()]

    columns = [
        last_row(Inputs(inputs.positions, width, probe=torch.eye(width)[i])) for i in range(width)
    ]
    probe = torch.linspace(-1, 1, width)
    mixed = last_row(Inputs(inputs.positions, width, probe=probe))
    by_side: list[list[Pairs]] = []
    for side, expected in enumerate(mixed):
        turned = torch.stack([column[side] for column in columns], dim=-1)  # (heads, out, in)
        if not _same(turned @ probe.double(), expected):
            return None
        heads = [_partners(head) for head in turned]
        if any(pairs is None for pairs in heads):
            return None
        by_side.append([pairs for pairs in heads if pairs is not None])
    return by_side


def _partners(turned: Tensor) -> Pairs | None:
    """Return the pairs of channels that one head rotates; None if it mixes others."""
    across = turned.abs().clone()
    across.fill_diagonal_(0)
    size, partner = across.max(0)
    pairs = tuple((i, int(j)) for i, j in enumerate(partner.tolist()) if size[i] > 1e-9 and i < j)
    for i, j in pairs:
        across[i, j] = across[j, i] = 0
    return pairs if across.max() <= CLOSE * turned.abs().max() else None


def _same(a: Tensor, b: Tensor) -> bool:
    return same(a, b, CLOSE)
