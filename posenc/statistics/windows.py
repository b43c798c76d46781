"""Estimate how differences vary between texts, by a paired bootstrap over test windows."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from posenc.statistics.pairs import ROUNDING, Gap

BOOTSTRAP_SAMPLES, MIN_WINDOWS = 2000, 8
"""Number of bootstrap samples; minimum number of windows."""


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
    counts = {len(each) for each in losses.values()}
    if len(counts) != 1 or len(losses) < 2 or min(counts) < MIN_WINDOWS:
        return {}
    (count,) = counts
    pairs = list(combinations(losses, 2))
    apart = np.array([np.subtract(losses[a], losses[b]) for a, b in pairs])
    means = apart.mean(1)
    random = np.random.default_rng(0)
    drawn = random.multinomial(count, np.full(count, 1 / count), size=BOOTSTRAP_SAMPLES) / count
    moved = drawn @ apart.T - means
    errors = np.sqrt((drawn @ (apart.T - means) ** 2 - moved**2).clip(0) / (count - 1))
    known = errors > ROUNDING * np.abs(apart).max()
    largest = np.divide(np.abs(moved), errors, out=np.zeros_like(moved), where=known).max(1)
    halves = np.quantile(largest, 0.95) * apart.std(1, ddof=1) / np.sqrt(count)
    found = {}
    for (a, b), mean, half in zip(pairs, means.tolist(), halves.tolist(), strict=True):
        found[a, b], found[b, a] = Gap(mean, half), Gap(-mean, half)
    return found
