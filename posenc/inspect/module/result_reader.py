"""Read what a module returns: as a rotation, as a bias, or as values by position."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from posenc.inspect.module.call_forms import CallForm, Inputs
from posenc.inspect.module.results import (
    ResultKind,
    are_close,
    bias_matrix,
    channels_by_position,
    floating_tensors,
    rows_by_position,
    to_double_precision,
)

ResultMeaning = Literal["rotated content", "cos and sin", "sinusoids", "complex", "bias", "values"]
"""What the numbers are that the module returns, as its report names them."""
Run = Callable[[Inputs], Any]
"""Calls a fresh copy of the module with inputs, and returns what it returns."""
Pairs = tuple[tuple[int, int], ...]
"""Pairs of channels, by their indices."""
PositionAxes = dict[int, tuple[int, ...]]
"""For each tensor that is read, by its index among the tensors that the module returns: its axes of
positions, as negative numbers. A bias may have two, anything else has one."""

TOLERANCE = 1e-4
"""Smaller relative differences are rounding of float32 sums and sines."""
_NUM_TOKENS = 11
"""Tokens of the call by which the reader of a result is chosen. This number and the next are
chosen."""
_NUM_TURNED_TOKENS = 24
"""Tokens of the calls by which rotated pairs are found: the last one is looked at."""


class UnfitCall(ValueError):
    """Raised if one form of calling a module shows nothing about positions. The message says
    why."""


@dataclass(frozen=True)
class ResultReader:
    """How to read the results of a module.

    kind: what they are read as: a rotation (angles and lengths of pairs of channels), a bias
        (logits by query and key) or values.
    meaning: what the numbers of the module are.
    axes: which tensors are read, and their axes of positions.
    pairs: the pairs of channels that rotate together. A result is read as values although it
        rotates if some heads, or queries and keys, rotate other pairs than the rest: `pairs` then
        lists every pair that any of them rotates. Other values, and biases, have none.
    probe: the content of a token that shows positions best, (width); None for random content.
    """

    kind: ResultKind
    meaning: ResultMeaning
    axes: PositionAxes
    pairs: Pairs = ()
    probe: Tensor | None = None

    def read(self, returned: Any, batch: int = 1, row: int = 0) -> Tensor:
        """Return what is read, in float64: of a rotation (positions, pairs) complex, of a bias
        (heads, queries, keys), of values (positions, features).

        Of rotated content the pairs are those of all heads of the queries, and then those of all
        heads of the keys. batch: rows that the call had. row: which of them is read.
        """
        if self.meaning == "rotated content":
            return torch.cat(
                [side.flatten(1) for side in self.rotated_sides(returned, batch, row)], -1
            )
        parts = self.tensors_of_row(returned, batch, row)
        # For each of the parts, its axes that count positions. Readers other than of "cos and sin"
        # and "values" take a single part.
        axes_of_parts = list(self.axes.values())
        match self.meaning:
            case "bias":
                return to_double_precision(bias_matrix(parts[0], axes_of_parts[0]))
            case "cos and sin":
                cos, sin = (
                    to_double_precision(rows_by_position(part, part_axes[0]))
                    for part, part_axes in zip(parts, axes_of_parts, strict=True)
                )
                return torch.complex(cos, sin)
            case "sinusoids":
                table = to_double_precision(rows_by_position(parts[0], axes_of_parts[0][0]))
                first, second = (list(channels) for channels in zip(*self.pairs, strict=True))
                return torch.complex(table[:, first], table[:, second])
            case "complex":
                return to_double_precision(rows_by_position(parts[0], axes_of_parts[0][0]))
        all_rows = [
            rows_by_position(part, part_axes[0])
            for part, part_axes in zip(parts, axes_of_parts, strict=True)
        ]
        return to_double_precision(torch.cat(all_rows, -1))

    def rotated_sides(self, returned: Any, batch: int = 1, row: int = 0) -> list[Tensor]:
        """Return the rotated queries, and rotated keys if they are returned too: (positions, heads,
        pairs) complex."""
        first, second = (list(channels) for channels in zip(*self.pairs, strict=True))
        rotated = self.rotated_channels(returned, batch, row)
        return [torch.complex(side[..., first], side[..., second]) for side in rotated]

    def by_head(self, result: Tensor) -> Tensor:
        """Reshape what `read` returned of rotated content to (positions, sides, heads, pairs); the
        sides are queries, and keys if they are returned, too."""
        return result.reshape(len(result), len(self.axes), -1, len(self.pairs))

    def rotated_channels(self, returned: Any, batch: int = 1, row: int = 0) -> list[Tensor]:
        """Return the rotated queries, and keys if they are returned too: (positions, heads,
        channels)."""
        parts = zip(self.tensors_of_row(returned, batch, row), self.axes.values(), strict=True)
        return [to_double_precision(channels_by_position(part, axis[0])) for part, axis in parts]

    def tensors_of_row(self, returned: Any, batch: int, row: int) -> list[Tensor]:
        """Return the tensors that this reader takes of a result, cut to one row of the batch: each
        keeps an axis of size 1 for it. A tensor without an axis of the batch is not cut."""
        returned_tensors = floating_tensors(returned)
        parts = [returned_tensors[index] for index in self.axes]
        if batch > 1:
            parts = [part[row][None] if len(part) == batch else part for part in parts]
        return parts


def reader_of_results(
    run: Run, as_word: str, form: CallForm, width: int, axes: list[tuple[int, ...]]
) -> ResultReader:
    """Return the reader that fits the results of a module.

    run: calls the module. as_word: the word of --as. form: how it is called. width: channels of a
    token or head. axes: the axes of positions of each tensor that it returns; a tensor with none is
    not read.

    Raises: UnfitCall if the results are not what RETURNS_IN_WORDS[returns] promises.
    """
    axes_by_index = {index: part_axes for index, part_axes in enumerate(axes) if part_axes}
    match as_word:
        case "cos-sin":
            return _cos_sin_reader(run, width, axes_by_index)
        case "rotate":
            return _rotated_content_reader(run, form, width, axes_by_index)
        case "bias" | "scores":
            return _bias_reader(axes_by_index)
    return _added_content_reader(run, width, axes_by_index)


def _bias_reader(axes: PositionAxes) -> ResultReader:
    """Return a reader of the first tensor that has a number for each query and key, or one row of
    keys for all queries."""
    for index, part_axes in axes.items():
        is_same_row_for_every_query = part_axes == (-1,)
        if len(part_axes) > 1 or is_same_row_for_every_query:
            return ResultReader("bias", "bias", {index: part_axes})
    raise UnfitCall("returns nothing by query and key, and no row by key")


def _cos_sin_reader(run: Run, width: int, axes: PositionAxes) -> ResultReader:
    """Return a reader of cosines and sines: two real tensors or one complex one.

    Raises: UnfitCall if there are others, or if they change with the content of x.
    """
    parts = floating_tensors(run(Inputs(torch.arange(_NUM_TOKENS), width)))
    tables = [parts[index] for index in axes]
    parts_with_probe = floating_tensors(
        run(Inputs(torch.arange(_NUM_TOKENS), width, probe=torch.zeros(width)))
    )
    if not all(
        _are_close(part, parts_with_probe[index]) for part, index in zip(tables, axes, strict=True)
    ):
        raise UnfitCall("what it returns depends on the content of x, and not on positions only")
    if tables[0].is_complex():  # cosines are its real part, sines the imaginary one
        return ResultReader("rotation", "complex", dict(list(axes.items())[:1]))
    if len(tables) != 2:
        raise UnfitCall(
            f"returns {len(tables)} real tensors by position, and not cosines and sines"
        )
    widths = [
        rows_by_position(part, axis[0]).shape[-1]
        for part, axis in zip(tables, axes.values(), strict=True)
    ]
    if widths[0] != widths[1]:
        raise UnfitCall(f"returns cosines and sines of {widths[0]} and {widths[1]} channels")
    return ResultReader("rotation", "cos and sin", axes)


def _rotated_content_reader(
    run: Run, form: CallForm, width: int, axes: PositionAxes
) -> ResultReader:
    """Return a reader of rotated queries, keys or x: as a rotation if no two pairs share a channel,
    else as values. The arguments are those of `reader_of_results`.

    Raises: UnfitCall if the module does not return as many tensors as it is given, or one of
    another width.
    """
    num_inputs = len(form.words & {"x", "q", "k"})
    parts = floating_tensors(run(Inputs(torch.arange(_NUM_TOKENS), width)))
    rotated_parts = [parts[index] for index in axes]
    if len(rotated_parts) != num_inputs or any(part.shape[-1] != width for part in rotated_parts):
        shapes = ", ".join(str(tuple(part.shape)) for part in rotated_parts)
        raise UnfitCall(
            f"returns {shapes}, and not {num_inputs} tensors in the shape of what it is given"
        )
    pairs_by_side = find_rotated_pairs(run, width, axes)
    if pairs_by_side is None:
        return ResultReader("values", "values", axes)
    pairs_of_all = _union_of_pairs(pairs_by_side)
    if pairs_of_all and not _share_channels(pairs_of_all):
        # Only channels that some head rotates get content, so that a pair shows its angle in its
        # first channel alone. A head may leave some of these pairs as they are.
        probe = torch.zeros(width)
        probe[[i for i, _ in pairs_of_all]] = 1
        return ResultReader("rotation", "rotated content", axes, pairs_of_all, probe)
    # Pairs that share a channel cannot be read as one rotation. Pairs next to values tell the
    # checks that queries and keys rotate different channels, so they are left out if both rotate
    # alike.
    sides_are_alike = all(pairs_by_head == pairs_by_side[0] for pairs_by_head in pairs_by_side)
    return ResultReader("values", "values", axes, () if sides_are_alike else pairs_of_all)


def _union_of_pairs(pairs_by_side: list[list[Pairs]]) -> Pairs:
    """Return each pair that any head of any side rotates, once and sorted.

    pairs_by_side: for queries, and for keys if they are returned, too, the pairs of each head.
    """
    pairs: set[tuple[int, int]] = set()
    for pairs_by_head in pairs_by_side:
        pairs.update(*pairs_by_head)
    return tuple(sorted(pairs))


def _share_channels(pairs: Pairs) -> bool:
    """Return True if any channel is in two pairs."""
    channels = [channel for pair in pairs for channel in pair]
    return len(set(channels)) < len(channels)


def _added_content_reader(run: Run, width: int, axes: PositionAxes) -> ResultReader:
    """Return a reader of a module that returns its input with positions added, or the added rows
    alone, found by running it on an input of zeros, too.

    The rows are read as sinusoids if they are such, else as values.
    Raises: UnfitCall if it does neither.
    """
    if any(len(part_axes) > 1 for part_axes in axes.values()):
        raise UnfitCall("returns something for each pair of positions, and not for each position")

    def added_tensors(probe: Tensor | None = None) -> list[Tensor]:
        parts = floating_tensors(run(Inputs(torch.arange(_NUM_TOKENS), width, probe=probe)))
        return [parts[index] for index in axes]

    parts = added_tensors()
    parts_for_zeros = added_tensors(torch.zeros(width))
    content_plays_no_part = all(
        _are_close(a, b) for a, b in zip(parts, parts_for_zeros, strict=True)
    )
    if content_plays_no_part:
        return _table_reader(parts, axes)
    if all(map(_adds_same_content, parts, parts_for_zeros, axes.values())):
        return replace(_table_reader(parts_for_zeros, axes), probe=torch.zeros(width))
    if not any(part.any() for part in parts_for_zeros):  # as of a rotation
        raise UnfitCall("what it returns is not its input with a row added for each position")
    return ResultReader("values", "values", axes)  # as where a norm follows


def _adds_same_content(with_content: Tensor, with_zeros: Tensor, axes: tuple[int, ...]) -> bool:
    """Return True if the content of tokens changes the result by the same row at each position.

    with_content, with_zeros: results for equal tokens, and for tokens of zeros. axes: the axis of
    positions of both.
    """
    difference = rows_by_position(with_content, axes[0]) - rows_by_position(with_zeros, axes[0])
    return _are_close(difference, difference[:1].expand_as(difference))


def _table_reader(parts: list[Tensor], axes: PositionAxes) -> ResultReader:
    """Return a reader of a table of positions: as sinusoids if its channels are sines and cosines
    in pairs, else as values."""
    first_part = parts[0]
    axis = next(iter(axes.values()))
    table = to_double_precision(rows_by_position(first_part, axis[0]))
    for pairs in _pair_layouts(table.shape[-1]) if len(parts) == 1 else ():
        a, b = (table[:, list(channels)] for channels in zip(*pairs, strict=True))
        if _are_cosine_and_sine(a, b):
            return ResultReader("rotation", "sinusoids", axes, pairs)
    return ResultReader("values", "values", axes)


def _pair_layouts(width: int) -> tuple[Pairs, ...]:
    """Return the layouts in which sine and cosine of one angle may be: neighbours, or one in each
    half. 4 -> (((0, 1), (2, 3)), ((0, 2), (1, 3))); an odd width has none."""
    if width % 2 or not width:
        return ()
    half = width // 2
    neighbours = tuple((2 * i, 2 * i + 1) for i in range(half))
    return neighbours, tuple((i, i + half) for i in range(half))


def _are_cosine_and_sine(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b (positions, pairs) may be cosines and sines of the same angles, up to
    a factor for each pair: their squares have the same sum at each position."""
    sums_of_squares = a**2 + b**2
    return bool((sums_of_squares > 0).all()) and _are_close(
        sums_of_squares, sums_of_squares[:1].expand_as(sums_of_squares)
    )


def find_rotated_pairs(run: Run, width: int, axes: PositionAxes) -> list[list[Pairs]] | None:
    """Return for each tensor and each of its heads the pairs of channels that rotate together. None
    if a head mixes more than two channels, or is not linear.

    The pairs are read from the linear map of each head at the last of _NUM_TURNED_TOKENS positions.
    Its columns are what the module returns if only one channel has content.
    """
    positions = torch.arange(_NUM_TURNED_TOKENS)

    def rotate_at_last_position(probe: Tensor) -> list[Tensor]:
        """Return what the module makes of the content `probe` (width) at the last position: for
        each tensor, (heads, width)."""
        parts = floating_tensors(run(Inputs(positions, width, probe=probe)))
        last_rows = []
        for index, (token_axis, *_) in axes.items():
            rows = channels_by_position(parts[index], token_axis)
            last_rows.append(rows[-1].double())
        return last_rows

    columns = [rotate_at_last_position(torch.eye(width)[i]) for i in range(width)]
    probe = torch.linspace(-1, 1, width)
    returned_for_mixture = rotate_at_last_position(probe)
    pairs_by_side: list[list[Pairs]] = []
    for side, returned in enumerate(returned_for_mixture):
        linear_maps = torch.stack([column[side] for column in columns], dim=-1)  # (heads, out, in)
        if not _are_close(linear_maps @ probe.double(), returned):
            return None
        pairs_by_head = [_pairs_rotated_by_head(head) for head in linear_maps]
        if any(pairs is None for pairs in pairs_by_head):
            return None
        pairs_by_side.append([pairs for pairs in pairs_by_head if pairs is not None])
    return pairs_by_side


def _pairs_rotated_by_head(linear_map: Tensor) -> Pairs | None:
    """Return the pairs of channels that one head rotates; None if it mixes others.

    linear_map: of the head, (channels out, channels in).
    """
    between_channels = linear_map.abs().clone()
    between_channels.fill_diagonal_(0)
    # The partner is the other channel that each channel moves most.
    largest_entries, partners = between_channels.max(0)
    pairs = tuple(
        (i, int(j)) for i, j in enumerate(partners.tolist()) if largest_entries[i] > 1e-9 and i < j
    )
    for i, j in pairs:
        between_channels[i, j] = between_channels[j, i] = 0
    return pairs if between_channels.max() <= TOLERANCE * linear_map.abs().max() else None


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b differ by rounding only, see TOLERANCE."""
    return are_close(a, b, TOLERANCE)
