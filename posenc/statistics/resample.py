"""The bootstrap over seeds: which trials each draw takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 10_000


def draw_seeds(num_seeds: Sequence[int], draws: int, random: np.random.Generator) -> np.ndarray:
    """Resample the seeds inside every task (stratified).

    Args:
        num_seeds: how many seeds each task has; they lie one behind the other.

    Returns: (draws, trials) indices into those trials; the draws serve all encodings, so that pairs
    stay pairs.

    >>> draw_seeds([2, 3], 4, np.random.default_rng(0)).shape
    (4, 5)
    """
    starts = np.cumsum([0, *num_seeds[:-1]])
    return np.concatenate(
        [
            start + random.integers(count, size=(draws, count))
            for start, count in zip(starts, num_seeds, strict=True)
        ],
        axis=1,
    )
