"""What another text like this one may give: a paired bootstrap over the windows of the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from posenc.statistics.pairs import ROUNDING, Gap

DRAWS, LEAST = 2000, 8
"""Draws of windows; windows below which they say nothing of others."""


def window_gaps(losses: Mapping[str, Sequence[float]]) -> dict[tuple[str, str], Gap]:
    """The mean of the first encoding minus that of the second, for each pair in either order.

    Every draw takes as many windows as there are, the same ones for all encodings, and divides how
    far each mean has moved by the draw's own standard error. Half of an interval is the standard
    error times what the largest of these stays below in 95 % of the draws, so that all hold
    together.

    Args:
        losses: of each encoding, one number for each window.

    Returns: nothing for fewer than eight windows, or where two encodings differ in their number.

    >>> losses = {"t5": [2.0] * 9 + [2.2] * 9, "rope": [2.5] * 9 + [2.9] * 9}
    >>> gap = window_gaps(losses)["rope", "t5"]
    >>> round(gap.value, 2), 0.0 < gap.half < 0.1
    (0.6, True)
    """
    counts = {len(each) for each in losses.values()}
    if len(counts) != 1 or len(losses) < 2 or min(counts) < LEAST:
        return {}
    (count,) = counts
    pairs = list(combinations(losses, 2))
    apart = np.array([np.subtract(losses[a], losses[b]) for a, b in pairs])
    means = apart.mean(1)
    random = np.random.default_rng(0)
    drawn = random.multinomial(count, np.full(count, 1 / count), size=DRAWS) / count
    moved = drawn @ apart.T - means
    errors = np.sqrt((drawn @ (apart.T - means) ** 2 - moved**2).clip(0) / (count - 1))
    known = errors > ROUNDING * np.abs(apart).max()
    largest = np.divide(np.abs(moved), errors, out=np.zeros_like(moved), where=known).max(1)
    halves = np.quantile(largest, 0.95) * apart.std(1, ddof=1) / np.sqrt(count)
    found = {}
    for (a, b), mean, half in zip(pairs, means.tolist(), halves.tolist(), strict=True):
        found[a, b], found[b, a] = Gap(mean, half), Gap(-mean, half)
    return found
