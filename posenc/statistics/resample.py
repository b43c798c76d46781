"""Draws of the bootstrap over seeds, and over tasks and seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

DRAWS = 10_000


def draw_seeds(num_seeds: Sequence[int], draws: int, random: np.random.Generator) -> np.ndarray:
    """Resample the seeds inside every task (stratified).

    Args:
        num_seeds: number of seeds of each task; trials are ordered by task.

    Returns: (draws, trials) indices of trials, the same for all encodings, so pairs stay pairs.

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


def draw_tasks(
    num_seeds: Sequence[int], draws: int, random: np.random.Generator
) -> list[np.ndarray]:
    """Resample the tasks, then the seeds inside each drawn task (hierarchical).

    Args:
        num_seeds: as for `draw_seeds`.

    Returns: (draws, trials) indices of trials, one array for each total number of trials in a draw.

    >>> sorted(each.shape[1] for each in draw_tasks([2, 3], 40, np.random.default_rng(0)))
    [4, 5, 6]
    """
    counts = np.asarray(num_seeds)
    starts = np.cumsum(counts) - counts
    tasks = random.integers(len(counts), size=(draws, len(counts)))
    totals = counts[tasks].sum(axis=1)
    found = []
    for total in np.unique(totals):
        drawn = tasks[totals == total].ravel()
        first, size = (np.repeat(each[drawn], counts[drawn]) for each in (starts, counts))
        found.append((first + random.integers(size)).reshape(-1, total))
    return found
