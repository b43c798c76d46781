"""Scores pooled over tasks and seeds: interquartile mean and difference.

Their error is the standard deviation of a bootstrap, multiplied by sqrt(n / (n - 1)) and used with
Student's t. Percentiles of the bootstrap are too narrow for few seeds: in 800 simulated studies of
six tasks with three seeds, their 95 % intervals contained the truth in 84 %, these in 96 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from posenc.statistics.estimate import Estimate, error_or_unknown
from posenc.statistics.iqm import interquartile_mean
from posenc.statistics.resample import DRAWS, draw_seeds
from posenc.statistics.scores import Scores


def pooled_score(scores: Scores, encoding: str, resolution: float = 0.0) -> Estimate:
    """Return the interquartile mean of an encoding over tasks and seeds, with its error over other
    seeds of these tasks.

    Args:
        resolution: as for `posenc.statistics.paired.paired_difference`, for each task.
    """
    values, counts = shared_trials(scores, encoding)
    return _estimate(values, counts, values[0], lambda v: interquartile_mean(v[0]), resolution)


def pooled_difference(scores: Scores, a: str, b: str, resolution: float = 0.0) -> Estimate:
    """Return the interquartile mean of `b` minus that of `a`, over the trials that both have.

    Args:
        resolution: as for `pooled_score`.

    >>> from posenc.statistics.scores import Scores
    >>> values = [[[0.5, 0.6, 0.7], [0.1, 0.2, 0.1]], [[0.7, 0.7, 0.9], [0.3, 0.5, 0.2]]]
    >>> found = pooled_difference(Scores(["nope", "t5"], ["copy", "recall"], [0, 1, 2], values),
    ...                           "nope", "t5")
    >>> round(found.value, 3), found.half < 0.2, found.count
    (0.2, True, 6)
    """
    values, counts = shared_trials(scores, a, b)
    return _estimate(values, counts, values[1] - values[0], interquartile_difference, resolution)


def interquartile_difference(values: np.ndarray) -> np.ndarray:
    """Return the interquartile mean of values[1] minus that of values[0]."""
    return interquartile_mean(values[1]) - interquartile_mean(values[0])


def shared_trials(scores: Scores, *names: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return (names, trials) of trials that all have, by task, and the number per task."""
    rows = [list(scores.encodings).index(name) for name in names]
    shared = scores.counted()[rows].all(axis=0)
    counts = tuple(int(count) for count in shared.sum(axis=1) if count)
    return scores.values[rows][:, shared], counts


def _estimate(
    values: np.ndarray,
    counts: tuple[int, ...],
    gaps: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    resolution: float,
) -> Estimate:
    """Return a statistic of (names, trials) -> (), with its error.

    gaps: (trials,) values whose variation over seeds decides the degrees of freedom.
    """
    if not counts:
        return Estimate(math.nan, math.inf, 0, 0)
    value, trials = float(statistic(values)), sum(counts)
    size = min(counts)
    if size < 2:
        return Estimate(value, math.inf, 0, trials)
    spread = float(statistic(values[:, _draws(counts, DRAWS)]).std(ddof=1))
    error = spread * math.sqrt(size / (size - 1))
    per_task = np.split(gaps, np.cumsum(counts)[:-1])
    floor = resolution / math.sqrt(trials)
    error = error_or_unknown(max(error, floor), float(np.abs(values).max()))
    return Estimate(value, error, _freedom(per_task, resolution), trials)


@lru_cache(maxsize=64)
def _draws(counts: tuple[int, ...], draws: int) -> np.ndarray:
    """Return the same draws for every encoding and every call, so that a page is reproducible."""
    return draw_seeds(counts, draws, np.random.default_rng(0))


def _freedom(per_task: list[np.ndarray], resolution: float) -> float:
    """Return Welch's and Satterthwaite's degrees of freedom of a mean over tasks."""
    variances = np.array([max(g.var(ddof=1), resolution**2) / len(g) for g in per_task])
    each = np.array([len(g) - 1 for g in per_task])
    if not variances.any():
        return float(each.sum())
    return float(variances.sum() ** 2 / (variances**2 / each).sum())
