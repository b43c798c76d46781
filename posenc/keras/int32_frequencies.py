"""Compute cos and sin of position times frequency in 32-bit arithmetic, alike on all backends."""

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from posenc.frequencies.series import DIGIT_BITS, PART_BITS, digit_turns
from posenc.keras.position_layer import ops

PHASE_BITS = 30
"""A phase counts units of 2^-30 turn, so that int32 has room for sums."""
QUARTER_TURN = 1 << (PHASE_BITS - 2)
FINE_BITS = 12
"""The last bits of a phase; the others count coarse steps of 2^12 units, of which an eighth of a
turn has 2^15, which float32 holds exactly."""
_RADIANS_PER_COARSE_STEP = 2 * math.pi / (1 << (PHASE_BITS - FINE_BITS))
_ROUNDED_RADIANS_PER_COARSE_STEP = round(_RADIANS_PER_COARSE_STEP * 2**23) / 2**23
"""Radians per coarse step, rounded to 8 significant bits, so that a product with a 16-bit number is
exact in float32. What rounding leaves out is added with the fine part."""


class Int32Frequencies:
    """Hold frequencies as whole numbers that fit int32, and compute cos and sin of p * inv_freq,
    with an error below 1.5e-7 at each whole |p| < 2^31.

    jax has neither int64 nor float64 by default. So turns are counted in units of 2^-30 by integers
    that cannot overflow an int32, and only a rest below an eighth of a turn becomes a float. Real
    positions are as exact as their dtype.
    """

    def __init__(self, inv_freq: Sequence[Decimal | float]) -> None:
        self.high, self.low = digit_turns(inv_freq)
        self.radians = tuple(float(f) for f in inv_freq)

    def cos_sin(self, positions: Any, factor: float = 1.0) -> tuple[Any, Any]:
        """Return float32 cos and sin times `factor`, each (*positions.shape, pairs)."""
        positions = ops.expand_dims(ops.convert_to_tensor(positions), -1)
        fraction = None
        if "float" in str(positions.dtype):
            whole = ops.floor(positions)
            fraction = ops.cast(positions - whole, "float32") * ops.convert_to_tensor(
                self.radians, "float32"
            )
            positions = whole
        phase = self._whole_phase(ops.cast(positions, "int32"))
        # The nearest quarter turn; the rest is at most an eighth of a turn.
        quarter = ops.right_shift(phase + QUARTER_TURN // 2, PHASE_BITS - 2)
        cos, sin = _cos_sin_of_rest(phase - ops.left_shift(quarter, PHASE_BITS - 2), fraction)
        # A turn by a quarter maps (cos, sin) to (-sin, cos), one by a half to (-cos, -sin).
        odd = ops.bitwise_and(quarter, 1) == 1
        half = ops.bitwise_and(quarter, 2) == 2
        cos, sin = ops.where(odd, -sin, cos), ops.where(odd, cos, sin)
        sign = ops.where(half, -factor, factor)
        return cos * sign, sin * sign

    def _whole_phase(self, positions: Any) -> Any:
        """Return the phases of whole positions (..., 1), in units of 2^-30 turn, modulo one
        turn."""
        size = ops.abs(positions)
        high = low = 0
        for digit, (turn, part) in enumerate(zip(self.high, self.low, strict=True)):
            count = ops.right_shift(size, digit * DIGIT_BITS)
            count = ops.bitwise_and(count, (1 << DIGIT_BITS) - 1)
            turn, part = (ops.convert_to_tensor(numbers, "int32") for numbers in (turn, part))
            high = high + ops.bitwise_and(count * turn, (1 << PART_BITS) - 1)
            low = low + ops.right_shift(count * part, 2 * PART_BITS - PHASE_BITS)
        high = ops.bitwise_and(high, (1 << PART_BITS) - 1)
        phase = ops.left_shift(high, PHASE_BITS - PART_BITS) + low
        phase = ops.where(positions < 0, -phase, phase)
        return ops.bitwise_and(phase, (1 << PHASE_BITS) - 1)


def _cos_sin_of_rest(rest: Any, fraction: Any) -> tuple[Any, Any]:
    """Return cos and sin of the angle `rest`, in units of 2^-30 turn and at most an eighth of a
    turn, plus `fraction` in radians."""
    coarse = ops.cast(ops.right_shift(rest, FINE_BITS), "float32")
    fine = ops.cast(ops.bitwise_and(rest, (1 << FINE_BITS) - 1), "float32")
    small = coarse * (_RADIANS_PER_COARSE_STEP - _ROUNDED_RADIANS_PER_COARSE_STEP) + fine * (
        _RADIANS_PER_COARSE_STEP / (1 << FINE_BITS)
    )
    if fraction is not None:
        small = small + fraction
    angle = coarse * _ROUNDED_RADIANS_PER_COARSE_STEP + small
    return ops.cos(angle), ops.sin(angle)
