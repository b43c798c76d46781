"""Compute cosine and sine of position times frequency, accurate at every int64 position."""

import math
from collections.abc import Sequence
from decimal import Decimal

import torch
from torch import Tensor

from posenc.encodings.numerics.caches import Constants
from posenc.frequencies.series import (
    UNITS_PER_TURN,
    radians_rounded_away,
    turns_in_fixed_point,
)

_RADIANS_PER_UNIT = 2 * math.pi / UNITS_PER_TURN


class ExactFrequencies:
    """Hold frequencies without rounding them, and compute cos and sin of p * inv_freq for integer
    or real positions p.

    The angle is reduced modulo a full turn in 64-bit fixed point before anything is rounded, and
    what fixed point cannot hold of a frequency is added in float64: cos and sin are accurate to
    1.5e-7 in float32 at every int64 position. Real positions are split into a whole and a
    fractional part and add no error of their own.

    The frequencies are Python numbers, copied to each device, so casting a module does not round
    them.
    """

    def __init__(
        self, inv_freq: Sequence[Decimal | float], axes: Sequence[int] | None = None
    ) -> None:
        """Store the frequencies.

        `axes`: for each frequency, the component of the position that it multiplies, if positions
        have a last axis of components.
        """
        self.inv_freq = tuple(inv_freq)
        self.axes = None if axes is None else tuple(axes)
        self.units_per_position = Constants(turns_in_fixed_point(self.inv_freq))
        self._radians_rounded_away = Constants(radians_rounded_away(self.inv_freq))
        self._axis_of_frequency = Constants(() if axes is None else axes)
        self._radians_per_position = Constants([float(f) for f in self.inv_freq])

    def __len__(self) -> int:
        return len(self.inv_freq)

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of position * inv_freq, both times `factor`, in `dtype`: each has a
        last axis of len(inv_freq), see `reduced_angles`."""
        angle = self.reduced_angles(positions)
        cos = angle.cos()
        sin = angle.sin()
        if factor != 1:
            cos = cos * factor
            sin = sin * factor
        return cos.to(dtype), sin.to(dtype)

    def reduced_angles(self, positions: Tensor) -> Tensor:
        """Return the angles position * inv_freq in radians, less whole turns, within (-2 pi, 2 pi):
        float64, (*shape, len(inv_freq)).

        `shape` is that of `positions`, without its axis of components if `axes` was given to the
        constructor.
        """
        if self.axes is None:
            positions = positions[..., None]
        else:
            axis_index = self._axis_of_frequency.like(positions.new_empty(0, dtype=torch.int64))
            positions = positions.index_select(-1, axis_index)
        if positions.is_floating_point():
            whole_positions = positions.double().floor().long()
        else:
            whole_positions = positions.long()
        # Products of int64 wrap at a full turn, which is 2^64 units.
        angle = (
            whole_positions * self.units_per_position.like(whole_positions)
        ).double() * _RADIANS_PER_UNIT
        whole_positions_as_float = whole_positions.double()
        angle = torch.addcmul(
            angle,
            whole_positions_as_float,
            self._radians_rounded_away.like(whole_positions_as_float),
        )
        if not positions.is_floating_point():
            return angle
        fraction = positions.double() - whole_positions
        return angle + torch.remainder(
            fraction * self._radians_per_position.like(fraction), 2 * math.pi
        )
