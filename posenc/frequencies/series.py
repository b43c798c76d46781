"""Geometric series of frequencies, as decimals of 50 digits and as integers.

float64 is not enough: an inverse frequency rounded to 53 bits is off by 2.4e-7 radians at position
2^31. The integers are turns per position in 64-bit fixed point: phases wrap exactly where 64-bit
integers do.
"""

from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache

DECIMAL_CONTEXT = Context(prec=50)
"""Decimal context of 50 digits. An angle at position 2^40 with 64 bits for its fraction of a turn
needs 32."""

TWO_PI = Decimal("6.2831853071795864769252867665590057683943387987502116419498891846")


@lru_cache(maxsize=256)
def geometric_series(
    count: int, base: float, exponent_step: Decimal | float
) -> tuple[Decimal, ...]:
    """Return `count` terms 1, r, r^2, ... of a geometric series with r = base^-exponent_step, to
    at least 45 digits.

    With exponent_step = 2 / rotary_dim these are the inv_freq of RoPE and the sinusoidal encoding.
    """
    with localcontext(DECIMAL_CONTEXT):
        ratio = Decimal(base) ** -Decimal(exponent_step)
        terms = [Decimal(1)]
        for _ in range(count - 1):
            terms.append(terms[-1] * ratio)
        return tuple(terms)


def inverse_frequencies(dim: int, base: float = 10000.0) -> tuple[Decimal, ...]:
    """Return base^(-2t/dim) for t = 0 .. dim/2 - 1, in radians per position; fastest first."""
    with localcontext(DECIMAL_CONTEXT):
        return geometric_series(dim // 2, base, Decimal(2) / dim)


def endpoint_frequencies(count: int, base: float = 10000.0) -> tuple[Decimal, ...]:
    """Return base^(-t/(count-1)) for t = 0 .. count - 1: from 1 to 1/base, both included."""
    with localcontext(DECIMAL_CONTEXT):
        return geometric_series(count, base, Decimal(1) / max(count - 1, 1))


SINUSOIDAL_ORDERS = ("interleaved", "concatenated", "fairseq")


def sinusoidal_frequencies(
    embed_dim: int, base: float, order: str, min_timescale: float
) -> tuple[Decimal, ...]:
    """Return the frequencies of posenc.Sinusoidal, in radians per position; fastest first."""
    if order not in SINUSOIDAL_ORDERS:
        raise ValueError(f"Sinusoidal: order must be one of {SINUSOIDAL_ORDERS}, got {order!r}.")
    if embed_dim % 2 and order != "fairseq":
        raise ValueError(
            f"Sinusoidal: embed_dim must be even for the order {order!r}, got {embed_dim}."
        )
    if embed_dim < 2 or not 0 < min_timescale < base:
        raise ValueError(
            "Sinusoidal: embed_dim must be at least 2 and 0 < min_timescale < base, "
            f"got embed_dim={embed_dim}, min_timescale={min_timescale}, base={base}."
        )
    ratio = base / min_timescale
    if order == "fairseq":
        inv_freq = endpoint_frequencies(embed_dim // 2, ratio)
    else:
        inv_freq = inverse_frequencies(embed_dim, ratio)
    with localcontext(DECIMAL_CONTEXT):
        return tuple(f / Decimal(min_timescale) for f in inv_freq)


UNITS_PER_TURN = 1 << 64
"""Number of fixed-point units in a full turn, so a unit is 2^-64 turn."""


def turns_in_fixed_point(inv_freq: Sequence[Decimal | float]) -> tuple[int, ...]:
    """Return the turns per position of each frequency, modulo one turn, in units of 2^-64 turn, as
    signed 64-bit integers."""
    with localcontext(DECIMAL_CONTEXT):
        units = [int((Decimal(f) / TWO_PI * UNITS_PER_TURN).to_integral_value()) for f in inv_freq]
    return tuple((u + UNITS_PER_TURN // 2) % UNITS_PER_TURN - UNITS_PER_TURN // 2 for u in units)


def radians_rounded_away(inv_freq: Sequence[Decimal | float]) -> tuple[float, ...]:
    """Return, for each frequency, the part that `turns_in_fixed_point` rounds away, in radians per
    position. It is below 2e-19 in absolute value, and matters for positions from 2^40 on."""
    with localcontext(DECIMAL_CONTEXT):
        units = [Decimal(f) / TWO_PI * UNITS_PER_TURN for f in inv_freq]
        return tuple(float((u - u.to_integral_value()) / UNITS_PER_TURN * TWO_PI) for u in units)


DIGIT_BITS = 11
"""Bits of each of the three digits of a position. The product of a digit and a 20-bit number fits
int32."""
PART_BITS = 20
"""Bits of each of the two parts, high and low, into which 40 bits of a turn are split."""


def digit_turns(
    inv_freq: Sequence[Decimal | float],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the turns of a position, split into its three 11-bit digits, for int32 arithmetic.

    Returns (high, low), each [digit][frequency]: one unit of digit k adds high[k] / 2^20 + low[k] /
    2^40 of a full turn to the angle.
    """
    high_parts = []
    low_parts = []
    for digit_index in range(3):
        # One unit of digit k is 2^(11 k) positions. Keep the upper 40 of the 64 bits of its turn,
        # modulo one.
        turns_of_unit = [
            (t << (digit_index * DIGIT_BITS)) % UNITS_PER_TURN
            for t in turns_in_fixed_point(inv_freq)
        ]
        upper_bits = [t >> (64 - 2 * PART_BITS) for t in turns_of_unit]
        high_parts.append(tuple(bits >> PART_BITS for bits in upper_bits))
        low_parts.append(tuple(bits % (1 << PART_BITS) for bits in upper_bits))
    return tuple(high_parts), tuple(low_parts)
