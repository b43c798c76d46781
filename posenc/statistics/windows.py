"""Estimate how differences vary between texts, by a paired bootstrap over test windows."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from posenc.statistics.pairs import ROUNDING, Gap

BOOTSTRAP_SAMPLES = 2000
"""Number of bootstrap samples; chosen, not derived: about 100 lie above the 95 % quantile."""
MIN_WINDOWS = 8
"""Number of windows below which there are no intervals; chosen, not derived."""


def window_gaps(losses: Mapping[str, Sequence[float]]) -> dict[tuple[str, str], Gap]:
    """Return the difference of mean losses, first minus second encoding, for each pair in either
    order.

    The confidence intervals hold simultaneously with 95 %. A bootstrap sample draws the same
    windows for all encodings. Its statistic is the largest change of a difference, in units of its
    standard error in the sample; the 95 % quantile of it times the standard error is the
    half-width.

    Args:
        losses: for each encoding, one number per window.

    Returns: {} for fewer than eight windows, or if two encodings have different numbers of windows.

    >>> losses = {"t5": [2.0] * 9 + [2.2] * 9, "rope": [2.5] * 9 + [2.9] * 9}
    >>> gap = window_gaps(losses)["rope", "t5"]
    >>> round(gap.value, 2), 0.0 < gap.half < 0.1
    (0.6, True)
    """
    counts = {len(of_windows) for of_windows in losses.values()}
    if len(counts) != 1 or len(losses) < 2 or min(counts) < MIN_WINDOWS:
        return {}
    (count,) = counts
    pairs = list(combinations(losses, 2))
    differences = np.array([np.subtract(losses[a], losses[b]) for a, b in pairs])
    means = differences.mean(1)
    random = np.random.default_rng(0)  # of a fixed seed: equal losses give equal intervals
    # Share of each window in each sample, (samples, windows); a window may be drawn repeatedly.
    shares = random.multinomial(count, np.full(count, 1 / count), size=BOOTSTRAP_SAMPLES) / count
    changes = shares @ differences.T - means  # (samples, pairs)
    # Variance as mean square minus squared mean, which rounding may leave below 0.
    variances = (shares @ (differences.T - means) ** 2 - changes**2).clip(0)
    errors = np.sqrt(variances / (count - 1))
    # A pair whose differences are all alike in a sample has no error to divide by.
    varies = errors > ROUNDING * np.abs(differences).max()
    largest = np.divide(np.abs(changes), errors, out=np.zeros_like(changes), where=varies).max(1)
    halves = np.quantile(largest, 0.95) * differences.std(1, ddof=1) / np.sqrt(count)
    gaps = {}
    for (a, b), mean, half in zip(pairs, means.tolist(), halves.tolist(), strict=True):
        gaps[a, b] = Gap(mean, half)
        gaps[b, a] = Gap(-mean, half)
    return gaps
