"""A number measured on a few seeds, with the error that it has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error, and the degrees of freedom of that error.

    An error that is not known is infinite: then nothing is told apart. So it is with one seed, and
    with seeds that are equal to the last digit, which are copies and no evidence.

    Args:
        value: NaN where there is no trial.
        error: standard error, or infinite.
        freedom: degrees of freedom of Student's t.
        count: how many trials it stands on.

    >>> gap = Estimate(1.1, 0.058, freedom=2, count=3)
    >>> round(gap.half, 2), gap.p < 0.05
    (0.25, True)
    """

    value: float
    error: float
    freedom: float
    count: int

    @property
    def half(self) -> float:
        """Half of the 95 % interval, or infinite."""
        return self.error * _quantile(self.freedom) if self.error < math.inf else math.inf

    @property
    def p(self) -> float:
        """Two-sided p-value of "it is 0"; 1 where the error is not known."""
        if not self.error < math.inf:
            return 1.0
        from scipy.special import stdtr

        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))


def error_or_unknown(error: float, size: float) -> float:
    """`error`, or infinity where it is only rounding of numbers of this `size`, or NaN."""
    return error if error > 1e-12 * size else math.inf


@lru_cache
def _quantile(freedom: float) -> float:
    """Student's t, two-sided 95 %."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))
