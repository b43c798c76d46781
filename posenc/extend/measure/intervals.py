"""Estimate means with 95 % intervals."""

import math
from dataclasses import dataclass

import numpy as np

NUM_BOOTSTRAPS = 200
"""Resampled sets of documents per interval; chosen, not derived."""
FEWEST_DOCUMENTS = 3
"""Documents that an interval needs; of fewer, no resampling says how much texts differ."""


@dataclass(frozen=True)
class Estimate:
    """A token-weighted mean with a 95 % bootstrap interval over documents, NaN for fewer than
    FEWEST_DOCUMENTS."""

    mean: float
    low: float
    high: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return e to the mean, of a mean in nats, at most e^50."""
        return math.exp(min(self.mean, 50.0))


def estimate_mean(losses: np.ndarray, documents: np.ndarray) -> Estimate:
    """Return the mean of all losses that are not NaN, and its interval from resampled documents.
    documents: the document of every loss, in the same shape."""
    kept = ~np.isnan(losses)
    owners, index = np.unique(documents[kept], return_inverse=True)
    sums = np.bincount(index, losses[kept], len(owners))
    counts = np.bincount(index, minlength=len(owners)).astype(float)
    if not len(owners):
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(sums.sum() / counts.sum())
    tokens = int(counts.sum())
    if len(owners) < FEWEST_DOCUMENTS:
        return Estimate(mean, math.nan, math.nan, tokens)
    draws = np.random.default_rng(0).integers(0, len(owners), (NUM_BOOTSTRAPS, len(owners)))
    low, high = np.percentile(sums[draws].sum(1) / counts[draws].sum(1), [2.5, 97.5])
    return Estimate(mean, float(low), float(high), tokens)


def share_interval(right: int, total: int) -> tuple[float, float]:
    """Return the lower and upper end of Wilson's 95 % interval of a fraction, `right` of `total`.

    Source: Wilson 1927, doi:10.1080/01621459.1927.10502953.
    >>> [round(bound, 4) for bound in share_interval(9, 10)]
    [0.5958, 0.9821]
    """
    # Loaded here, because it takes half a second, and only tasks with answers need it.
    from scipy.stats import binomtest

    bounds = binomtest(right, total).proportion_ci(0.95, method="wilson")
    return float(bounds.low), float(bounds.high)
