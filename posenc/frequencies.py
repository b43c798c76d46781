"""Frequencies as exact numbers: decimals from plain configuration, and turns per position in 64-bit
fixed point.

float64 is not enough: an inverse frequency rounded to 53 bits is off by 2.4e-7 radians at position
2^31. Nothing here needs torch or NumPy, so that every framework reads the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Context, Decimal, localcontext
from functools import lru_cache

PRECISION = Context(prec=50)
"""Decimal digits carried; 64-bit phases at position 2^40 need 32."""

TWO_PI = Decimal("6.2831853071795864769252867665590057683943387987502116419498891846")
TURN = 1 << 64
"""One full turn in fixed point: phases wrap exactly where 64-bit integers do."""


@lru_cache(maxsize=256)
def geometric(count: int, base: float, step: Decimal | float) -> tuple[Decimal, ...]:
    """(1, r, r^2, ...) of `count` terms with r = base^-step, to 45 digits or better.

    With step = 2 / rotary_dim this is RoPE's inv_freq; it is also the sinusoidal encoding's.
    """
    with localcontext(PRECISION):
        ratio = Decimal(base) ** -Decimal(step)
        terms = [Decimal(1)]
        for _ in range(count - 1):
            terms.append(terms[-1] * ratio)
        return tuple(terms)


def inverse_frequencies(dim: int, base: float = 10000.0) -> tuple[Decimal, ...]:
    """base^(-2t/dim) for t = 0 .. dim/2 - 1, in radians per position; fastest first."""
    with localcontext(PRECISION):
        return geometric(dim // 2, base, Decimal(2) / dim)


def endpoint_frequencies(count: int, base: float = 10000.0) -> tuple[Decimal, ...]:
    """base^(-t/(count-1)) for t = 0 .. count - 1: from 1 to 1/base, both included."""
    with localcontext(PRECISION):
        return geometric(count, base, Decimal(1) / max(count - 1, 1))


def turns(inv_freq: Sequence[Decimal | float]) -> tuple[int, ...]:
    """Turns per position in units of 2^-64 turn, as signed 64-bit integers that wrap like the phase
    does."""
    with localcontext(PRECISION):
        units = [int((Decimal(f) / TWO_PI * TURN).to_integral_value()) for f in inv_freq]
    return tuple((u + TURN // 2) % TURN - TURN // 2 for u in units)
