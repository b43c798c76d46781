"""Estimate means with 95 % intervals."""

import math
from dataclasses import dataclass

import numpy as np

BOOTSTRAPS = 200
FEWEST = 3
"""Documents that an interval needs; of fewer, no resampling says how much texts differ."""
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A token-weighted mean with a 95 % bootstrap interval over documents, NaN for fewer than
    FEWEST documents."""

    mean: float
    low: float
    high: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return e to the mean, of a mean in nats, at most e^50."""
        return math.exp(min(self.mean, 50.0))


def estimate(losses: np.ndarray, documents: np.ndarray) -> Estimate:
    """Return the token-weighted mean of the finite losses, and its interval from resampled
    documents."""
    kept = ~np.isnan(losses)
    owners, index = np.unique(documents[kept], return_inverse=True)
    sums = np.bincount(index, losses[kept], len(owners))
    counts = np.bincount(index, minlength=len(owners)).astype(float)
    if not len(owners):
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(sums.sum() / counts.sum())
    tokens = int(counts.sum())
    if len(owners) < FEWEST:
        return Estimate(mean, math.nan, math.nan, tokens)
    draws = np.random.default_rng(0).integers(0, len(owners), (BOOTSTRAPS, len(owners)))
    low, high = np.percentile(sums[draws].sum(1) / counts[draws].sum(1), [2.5, 97.5])
    return Estimate(mean, float(low), float(high), tokens)


def share_interval(right: int, of: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a fraction.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    >>> [round(bound, 4) for bound in share_interval(9, 10)]
    [0.5958, 0.9821]
    """
    share, z2 = right / of, Z95 * Z95
    middle = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = Z95 / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return middle - half, middle + half
