"""Frequencies as turns per position, in 64-bit fixed point.

Phases then wrap exactly where 64-bit integers do.
"""

from collections.abc import Sequence
from decimal import Decimal, localcontext

from posenc.frequencies.series import DECIMAL_CONTEXT, TWO_PI

UNITS_PER_TURN = 1 << 64
"""A full turn in fixed point."""


def turns_in_fixed_point(inv_freq: Sequence[Decimal | float]) -> tuple[int, ...]:
    """Return the turns per position of each frequency, modulo one turn, in units of 2^-64 turn, as
    signed 64-bit integers."""
    with localcontext(DECIMAL_CONTEXT):
        units = [int((Decimal(f) / TWO_PI * UNITS_PER_TURN).to_integral_value()) for f in inv_freq]
    return tuple((u + UNITS_PER_TURN // 2) % UNITS_PER_TURN - UNITS_PER_TURN // 2 for u in units)


def radians_rounded_away(inv_freq: Sequence[Decimal | float]) -> tuple[float, ...]:
    """Return what `turns_in_fixed_point` rounds away from each frequency, in radians per position.
    It is below 2e-19, either sign, and matters for positions from 2^40 on."""
    with localcontext(DECIMAL_CONTEXT):
        units = [Decimal(f) / TWO_PI * UNITS_PER_TURN for f in inv_freq]
        return tuple(float((u - u.to_integral_value()) / UNITS_PER_TURN * TWO_PI) for u in units)


DIGIT_BITS = 11
"""Bits of each of the three digits of a position; a digit times a 20-bit number fits int32."""
PART_BITS = 20
"""Bits of each of the two parts, high and low, into which 40 bits of a turn are split."""


def digit_turns(
    inv_freq: Sequence[Decimal | float],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the turns that each of a position's three 11-bit digits adds, for int32 arithmetic.

    Returns (high, low), each [digit][frequency]: one unit of digit k rotates by high[k] / 2^20 +
    low[k] / 2^40 of a full turn.
    """
    high = []
    low = []
    for digit in range(3):
        # One unit of digit k is 2^(11 k) positions. Keep the upper 40 of the 64 bits of its turn,
        # modulo one.
        of_unit = [
            (t << (digit * DIGIT_BITS)) % UNITS_PER_TURN for t in turns_in_fixed_point(inv_freq)
        ]
        upper_bits = [t >> (64 - 2 * PART_BITS) for t in of_unit]
        high.append(tuple(bits >> PART_BITS for bits in upper_bits))
        low.append(tuple(bits % (1 << PART_BITS) for bits in upper_bits))
    return tuple(high), tuple(low)
