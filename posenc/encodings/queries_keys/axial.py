"""RoPE over rows, columns and time: axial RoPE of vision and video models, and RoPE-Mixed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal, localcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posenc.arguments import check_count, explain_misfits
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import Cached, CachedPositions
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.numerics.torch_modes import extremes_if_readable, is_readable
from posenc.encodings.queries_keys.rotate import rotate
from posenc.encodings.queries_keys.rotation import (
    QueryKeyEncoding,
    RotatedQueriesKeys,
    Rotation,
    check_keys,
)
from posenc.frequencies.scalings.scaling import Frequencies
from posenc.frequencies.series import (
    DECIMAL_CONTEXT,
    TWO_PI,
    geometric_series,
    inverse_frequencies,
)
from posenc.positions.tokens import move_placeless_to_origin


class AxialRoPE(Rotation):
    """Rotate some pairs by the token's row, others by its column, and for video some by its time.

    angle[axis, t] = position[axis] * rope_theta^(-2t/axes[axis]),  t < axes[axis] / 2

    Tokens whose components are NaN (class and register tokens, see posenc.positions.grid) are not
    rotated; they stand before or after the cells of a grid. `rope_vit`, `dinov3`, `pixtral` and
    `ltx` build the variants of these models. Image and video generators are options: Wan is
    AxialRoPE(128, 10000.0, interleaved=True, axes=(44, 42, 42)); docs/encodings.md lists them.
    MRoPE shares one series between time, height and width.

    Args:
        head_dim: size of one head; a multiple of 4 unless `axes` is given.
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1); False: (t, t + head_dim/2).
        axes: channels of each component of the position, even numbers that sum to head_dim; the
            channels of the first component come first. None: head_dim / 2 for the row and as many
            for the column.
        column_first: rotate the first half of the pairs by the column.
        alternating: use one series rope_theta^(-2t/head_dim), even terms for the row and odd terms
            for the column; False: each axis has a series of its own.
        frequencies_in_turns: frequencies are full turns per unit; False: radians per unit. True is
            for coordinates within -1 .. 1, see posenc.positions.normalized_grid.
        ascending: frequencies rise with t, pi/2 * rope_theta^(t / (axes[axis] / 2 - 1)), the axes
            alternate from pair to pair, and channels that `axes` leaves come first and do not
            rotate. For coordinates within -1 .. 1.

    Shapes: positions (len, len(axes)) or (batch, len, len(axes)), by default (row, column), integer
    or real; q (batch, num_heads, q_len, head_dim) and k (batch, num_kv_heads, kv_len, head_dim) ->
    the same.
    Units: patches, or any unit. Precision: exact angles, rotated in float32, rounded once.
    Raises: ValueError if head_dim is not a multiple of 4, if the axes do not sum to it, or if
    column_first and alternating are given for other axes than two equal ones; for rows and columns
    where coordinates within -1 .. 1 are meant.
    Source: Heo et al. 2024, arXiv:2403.13298, section 3.2; for three axes Wan, arXiv:2503.20314.

    >>> rope = posenc.AxialRoPE(head_dim=64, interleaved=False)
    >>> cells = posenc.positions.grid(3, 4)
    >>> q, k = rope(torch.randn(1, 8, 12, 64), torch.randn(1, 8, 12, 64), cells)
    >>> q.shape
    torch.Size([1, 8, 12, 64])
    >>> video = posenc.AxialRoPE(64, 10000.0, interleaved=True, axes=(24, 20, 20))
    >>> frames = posenc.positions.grid(2, 3, 4)
    >>> video(torch.randn(1, 8, 24, 64), torch.randn(1, 8, 24, 64), frames)[0].shape
    torch.Size([1, 8, 24, 64])
    """

    claims = replace(
        Rotation.claims, source="Heo et al. 2024, arXiv:2403.13298, section 3.2", num_axes=2
    )

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 100.0,
        *,
        interleaved: bool,
        axes: Sequence[int] | None = None,
        column_first: bool = False,
        alternating: bool = False,
        frequencies_in_turns: bool = False,
        ascending: bool = False,
    ) -> None:
        super().__init__(head_dim, interleaved=interleaved)
        class_name = type(self).__name__
        if axes is None:
            _check_multiple_of_4(class_name, head_dim)
            axes = (head_dim // 2, head_dim // 2)
        self.axes = _checked_axes(class_name, axes, head_dim, may_leave_channels=ascending)
        _check_variant(
            class_name,
            self.axes,
            is_for_two_axes=column_first or alternating,
            is_in_turns=frequencies_in_turns,
            ascending=ascending,
        )
        if ascending:
            pairs = _ascending_pairs(self.axes, head_dim, rope_theta)
        else:
            order = (1, 0) if column_first else tuple(range(len(self.axes)))
            pairs = _descending_pairs(self.axes, order, rope_theta, alternating)
        inv_freq = tuple(pair.frequency for pair in pairs)
        if frequencies_in_turns:
            inv_freq = tuple(DECIMAL_CONTEXT.multiply(f, TWO_PI) for f in inv_freq)
        has_normalized_coordinates = frequencies_in_turns or ascending
        self.claims = replace(
            self.claims,
            num_axes=len(self.axes),
            coordinates="normalized" if has_normalized_coordinates else "cells",
        )
        self._set_frequencies(Frequencies(inv_freq), [pair.axis for pair in pairs])

    def _compute_cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.claims.coordinates == "normalized":
            _refuse_cells(positions)
        return super()._compute_cos_sin(positions, dtype)

    @classmethod
    @explain_misfits
    def rope_vit(cls, head_dim: int, rope_theta: float = 100.0) -> "AxialRoPE":
        """Build the variant of RoPE-ViT: interleaved pairs, the first half for columns."""
        return cls(head_dim, rope_theta, interleaved=True, column_first=True)

    @classmethod
    @explain_misfits
    def dinov3(cls, head_dim: int, rope_theta: float = 100.0) -> "AxialRoPE":
        """Build DINOv3's variant: half-split pairs, rows first, for coordinates from -1 to 1, see
        posenc.positions.normalized_grid."""
        return cls(head_dim, rope_theta, interleaved=False, frequencies_in_turns=True)

    @classmethod
    @explain_misfits
    def pixtral(cls, head_dim: int, rope_theta: float = 10000.0) -> "AxialRoPE":
        """Build Pixtral's variant: half-split pairs, alternately for rows and columns."""
        return cls(head_dim, rope_theta, interleaved=False, alternating=True)

    @classmethod
    @explain_misfits
    def ltx(cls, width: int, rope_theta: float = 10000.0) -> "AxialRoPE":
        """Build LTX-Video's variant, which rotates the queries and keys of all heads as one vector.

        width: num_heads * head_dim (2048 in LTX-Video): give q and k as (batch, 1, len, width),
            before they are split into heads.
        positions: 2 * fraction - 1 for (time, height, width), where the fraction is that of 20
            frames and of 2048 pixels.
        """
        channels_per_axis = width // 6 * 2
        axes = (channels_per_axis,) * 3
        return cls(width, rope_theta, interleaved=True, axes=axes, ascending=True)


class _Pair(NamedTuple):
    """The component of the position that rotates a pair of channels, and the pair's frequency."""

    axis: int
    frequency: Decimal


def _checked_axes(
    class_name: str, axes: Sequence[int], head_dim: int, may_leave_channels: bool
) -> tuple[int, ...]:
    """Return `axes` as a tuple. Raise TypeError or ValueError unless they are two or more even
    numbers that sum to head_dim, or to less if may_leave_channels."""
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise TypeError(f"{class_name}: axes must be a tuple of channels, got {axes!r}.")
    for channels in axes:
        check_count(class_name, "a number of channels in axes", channels, 2)
    num_channels = sum(axes)
    has_right_sum = num_channels == head_dim or (may_leave_channels and num_channels < head_dim)
    if len(axes) < 2 or any(channels % 2 for channels in axes) or not has_right_sum:
        raise ValueError(
            f"{class_name}: axes must be two or more even numbers of channels that sum to "
            f"head_dim={head_dim}, got {tuple(axes)}, which sum to {num_channels}."
        )
    return tuple(axes)


def _refuse_cells(positions: Tensor) -> None:
    """Raise ValueError for rows and columns where coordinates from -1 to 1 are meant: whole
    numbers, in an integer dtype or up to 2 and more. On an accelerator only the dtype is looked at,
    as for reading its numbers one would have to wait."""
    are_cells = not positions.is_floating_point()
    if not are_cells and is_readable(positions):
        places = positions[~positions.isnan()]
        low, high = extremes_if_readable(places) or (0, 0)
        # Numbers that are all the same tell nothing.
        are_cells = low < high and high >= 2 and bool((places % 1 == 0).all())
    if are_cells:
        raise ValueError(
            "AxialRoPE: this variant reads coordinates from -1 to 1 over the picture, and got rows "
            "and columns: give posenc.positions.normalized_grid(height, width)."
        )


def _check_variant(
    class_name: str,
    axes: Sequence[int],
    *,
    is_for_two_axes: bool,
    is_in_turns: bool,
    ascending: bool,
) -> None:
    """Raise ValueError for options of AxialRoPE that do not go together, or not with these axes.

    is_for_two_axes: column_first or alternating is given. is_in_turns: frequencies_in_turns is.
    """
    are_equal = len(set(axes)) == 1
    if is_for_two_axes and not (are_equal and len(axes) == 2):
        raise ValueError(
            f"{class_name}: column_first and alternating are for two equal axes, got axes={axes}."
        )
    if ascending and (is_for_two_axes or is_in_turns):
        raise ValueError(
            f"{class_name}: ascending has an order and a unit of its own: leave out column_first, "
            "alternating and frequencies_in_turns."
        )
    if ascending and not are_equal:
        raise ValueError(f"{class_name}: ascending needs equal axes, got axes={axes}.")


def _descending_pairs(
    axes: Sequence[int], order: Sequence[int], rope_theta: float, alternating: bool
) -> list[_Pair]:
    """Return the pairs of one axis after the other, each fastest first.

    order: the axes, by index, as they follow one another. alternating: the two axes share one
    series; the row has the terms with even indices, the column the others, whichever comes first.
    """
    joint_series = inverse_frequencies(sum(axes), rope_theta)
    pairs = []
    for axis in order:
        own_series = inverse_frequencies(axes[axis], rope_theta)
        series = joint_series[axis::2] if alternating else own_series
        pairs += [_Pair(axis, frequency) for frequency in series]
    return pairs


def _ascending_pairs(axes: Sequence[int], head_dim: int, rope_theta: float) -> list[_Pair]:
    """Return LTX-Video's pairs: those that do not rotate, then for each frequency, slowest first,
    one pair of each axis."""
    num_frequencies = axes[0] // 2
    num_still_pairs = (head_dim - sum(axes)) // 2
    pairs = [_Pair(0, Decimal(0))] * num_still_pairs
    with localcontext(DECIMAL_CONTEXT):
        quarter_turn = TWO_PI / 4
        exponent_step = Decimal(-1) / max(num_frequencies - 1, 1)
        for growth in geometric_series(num_frequencies, rope_theta, exponent_step):
            pairs += [_Pair(axis, growth * quarter_turn) for axis in range(len(axes))]
    return pairs


class MixedRoPE(QueryKeyEncoding):
    """Rotate each pair by the position along a learned direction in the plane: RoPE-Mixed.

    angle[h, t] = row * weight[0, h, t] + column * weight[1, h, t]

    Tokens whose row and column are NaN (class tokens, see posenc.positions.grid) are not rotated.

    Args:
        head_dim: size of one head, a multiple of 4.
        num_kv_heads: number of key/value heads; each has its own frequencies, shared by its query
            heads.
        rope_theta: base of the initial magnitudes rope_theta^(-4t/head_dim), each for two
            orthogonal directions; a random angle rotates the directions of each head.
        interleaved: pairs are (2t, 2t+1), as in the authors' code; False: (t, t + head_dim/2).

    Shapes: weight (2, num_kv_heads, head_dim/2); positions (len, 2) or (batch, len, 2) of (row,
    column).
    Units: radians per patch. Precision: angles in float64, rotated in float32, rounded once.
    Raises: ValueError if head_dim is not a multiple of 4, or k has another shape.
    Source: Heo et al. 2024, arXiv:2403.13298, section 3.3; github.com/naver-ai/rope-vit.

    >>> rope = posenc.MixedRoPE(head_dim=64, num_kv_heads=8)
    >>> cells = posenc.positions.grid(3, 4)
    >>> q, k = rope(torch.randn(1, 8, 12, 64), torch.randn(1, 8, 12, 64), cells)
    >>> rope.weight.shape
    torch.Size([2, 8, 32])
    """

    claims = Claims(
        places=(2,),
        source="Heo et al. 2024, arXiv:2403.13298, section 3.3",
        num_axes=2,
        scope="layer",
    )

    def __init__(
        self,
        head_dim: int,
        num_kv_heads: int,
        rope_theta: float = 10.0,
        *,
        interleaved: bool = True,
    ) -> None:
        super().__init__()
        _check_multiple_of_4(type(self).__name__, head_dim)
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.rope_theta = rope_theta
        self.interleaved = interleaved
        self.weight = nn.Parameter(torch.empty(2, num_kv_heads, head_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        frequencies = inverse_frequencies(self.head_dim // 2, self.rope_theta)
        magnitude = torch.tensor([float(f) for f in frequencies], device=self.weight.device)
        # One random direction per head, and the one at a right angle to it, with all magnitudes.
        angle = torch.rand(self.num_kv_heads, 1, device=self.weight.device) * 2 * math.pi
        angle = angle.expand(-1, len(magnitude))
        angle = torch.cat([angle, angle + math.pi / 2], -1)  # (num_kv_heads, pairs)
        # The authors' x is the column.
        along_row = angle.sin()
        along_column = angle.cos()
        self.weight.copy_(torch.stack([along_row, along_column]) * magnitude.repeat(2))

    def transform(self, q: Tokens, k: Tokens) -> RotatedQueriesKeys:
        assert q.x is not None and k.x is not None
        check_keys(self, k.x)
        return self._rotate(q.x, q.positions), self._rotate(k.x, k.positions)

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return self._rotate(k, after - before)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x (batch, heads, len, head_dim) rotated by the learned angles of its positions
        (len, 2) or (batch, len, 2)."""
        dtype = torch.promote_types(at_least_float32(x.dtype), self.weight.dtype)
        positions = move_placeless_to_origin(positions)
        _check_reach(positions)
        row_weight, column_weight = self.weight.double()[:, :, None]  # (num_kv_heads, 1, pairs)
        # (..., 1, len, 1), to broadcast over heads and pairs
        row, column = positions.double()[..., None, :, None, :].unbind(-1)
        angle = row * row_weight + column * column_weight
        # (batch, num_kv_heads, len, pairs), then one row of `rotate`'s batch for each head
        batch, num_heads = x.shape[:2]
        angle = angle.expand(batch, *angle.shape[-3:])
        angle = repeat_kv_heads(angle, num_heads).flatten(0, 1)
        cos = angle.cos().to(dtype)
        sin = angle.sin().to(dtype)
        rotated = rotate(x.flatten(0, 1)[:, None], cos, sin, interleaved=self.interleaved)
        return rotated.view_as(x)


_FARTHEST = 2**32
"""Absolute row or column, from which on float64 rounds position times weight by more than 1e-6
radians."""


def _check_reach(positions: Tensor) -> None:
    """Raise ValueError for a row or column of 2^32 or more in absolute value. Positions that are
    not on the CPU are not checked."""
    low, high = extremes_if_readable(positions) or (0, 0)
    if not (-_FARTHEST < low and high < _FARTHEST):
        raise ValueError(
            "MixedRoPE: positions must be below 2^32; beyond it float64 rounds learned angles."
        )


def _check_multiple_of_4(name: str, head_dim: int) -> None:
    """Raise ValueError unless head_dim is a multiple of 4, so that each axis gets half of the
    pairs."""
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f"{name}: head_dim must be a multiple of 4, got {head_dim}.")
