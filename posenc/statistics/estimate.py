"""A mean over few seeds with its standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number, its standard error, and the degrees of freedom of that error.

    An unknown error is infinite, and no difference is then significant. The error is unknown with
    one seed, and with seeds that are equal to the last digit, which are copies.

    Args:
        value: NaN if there is no trial.
        error: standard error, or infinite.
        freedom: degrees of freedom of Student's t.
        count: number of trials.

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
        """Return half of the width of the 95 % interval, or infinity."""
        return self.error * _quantile(self.freedom) if self.error < math.inf else math.inf

    @property
    def p(self) -> float:
        """Return the two-sided p-value of the hypothesis that it is 0; 1 for an unknown error."""
        if not self.error < math.inf:
            return 1.0
        from scipy.special import stdtr

        return float(2 * stdtr(self.freedom, -abs(self.value) / self.error))


def error_or_unknown(error: float, size: float) -> float:
    """Return `error`, or infinity if it is NaN or only rounding of numbers of this `size`."""
    return error if error > 1e-12 * size else math.inf


@lru_cache
def _quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))
