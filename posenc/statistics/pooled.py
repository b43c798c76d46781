"""Scores pooled over tasks and seeds: interquartile mean, difference, probability of improvement.

The error of each comes from a bootstrap: its standard deviation, made larger by sqrt(n / (n - 1)),
with Student's t. The percentiles of such a bootstrap are too narrow for a few seeds: over 800
simulated studies of six tasks with three seeds those of 95 % held the truth in 84 %, this in 96 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import numpy as np

from posenc.statistics.estimate import Estimate, error_or_unknown
from posenc.statistics.iqm import interquartile_mean
from posenc.statistics.resample import DRAWS, draw_seeds, draw_tasks
from posenc.statistics.scores import Scores


def pooled_score(scores: Scores, encoding: str, *, other_tasks: bool = False) -> Estimate:
    """Interquartile mean of an encoding over task x seed.

    Args:
        other_tasks: False: the error over other seeds of these tasks. True: also over other tasks
            like these, which is wider, and unknown with a single task.
    """
    values, counts = _trials(scores, encoding)
    return _estimate(values, counts, values[0], lambda v: interquartile_mean(v[0]), other_tasks)


def pooled_difference(
    scores: Scores, a: str, b: str, *, other_tasks: bool = False, resolution: float = 0.0
) -> Estimate:
    """Interquartile mean of `b` minus that of `a`, over the trials that both have.

    Args:
        other_tasks: as for `pooled_score`.
        resolution: as for `posenc.statistics.paired.paired_difference`, for each task.

    >>> from posenc.statistics.scores import Scores
    >>> values = [[[0.5, 0.6, 0.7], [0.1, 0.2, 0.1]], [[0.7, 0.7, 0.9], [0.3, 0.5, 0.2]]]
    >>> found = pooled_difference(Scores(["nope", "t5"], ["copy", "recall"], [0, 1, 2], values),
    ...                           "nope", "t5")
    >>> round(found.value, 3), found.half < 0.2, found.count
    (0.2, True, 6)
    """
    values, counts = _trials(scores, a, b)

    def difference(v: np.ndarray) -> np.ndarray:
        return interquartile_mean(v[1]) - interquartile_mean(v[0])

    return _estimate(values, counts, values[1] - values[0], difference, other_tasks, resolution)


def improvement(scores: Scores, a: str, b: str) -> Estimate:
    """Probability that a trial of `b` scores higher than one of `a` on the same task, in the mean
    over tasks; a tie counts one half.

    All pairs of seeds are compared, so it asks what a user of one new seed may expect, and not
    whether the means differ.

    Source: Agarwal et al. 2021, arXiv:2108.13264, section 4.3.
    """
    values, counts = _trials(scores, a, b)
    edges = np.cumsum([0, *counts])

    def probability(v: np.ndarray) -> np.ndarray:
        parts = []
        for start, stop in pairwise(edges):
            gaps = v[1][..., start:stop, None] - v[0][..., None, start:stop]
            parts.append((np.sign(gaps).mean(axis=(-2, -1)) + 1) / 2)
        return np.mean(parts, axis=0)

    return _estimate(values, counts, values[1] - values[0], probability, False)


def _trials(scores: Scores, *names: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """(names, trials) of the trials that all have, task by task, and how many each task has."""
    rows = [list(scores.encodings).index(name) for name in names]
    shared = scores.counted()[rows].all(axis=0)
    counts = tuple(int(count) for count in shared.sum(axis=1) if count)
    return scores.values[rows][:, shared], counts


def _estimate(
    values: np.ndarray,
    counts: tuple[int, ...],
    gaps: np.ndarray,
    statistic: Callable[[np.ndarray], np.ndarray],
    other_tasks: bool,
    resolution: float = 0.0,
) -> Estimate:
    """A statistic of (names, trials) -> (), with its error.

    gaps: (trials,) what varies from seed to seed; it decides the degrees of freedom.
    """
    if not counts:
        return Estimate(math.nan, math.inf, 0, 0)
    value, trials = float(statistic(values)), sum(counts)
    groups, size = (len(counts), len(counts)) if other_tasks else (len(counts), min(counts))
    if size < 2:
        return Estimate(value, math.inf, 0, trials)
    spread = float(statistic(values[:, _draws(counts, other_tasks, DRAWS)]).std(ddof=1))
    error = spread * math.sqrt(size / (size - 1))
    per_task = np.split(gaps, np.cumsum(counts)[:-1])
    floor = resolution / math.sqrt(trials)
    error = error_or_unknown(max(error, floor), float(np.abs(values).max()))
    freedom = groups - 1 if other_tasks else _freedom(per_task, resolution)
    return Estimate(value, error, freedom, trials)


@lru_cache(maxsize=64)
def _draws(counts: tuple[int, ...], other_tasks: bool, draws: int) -> np.ndarray:
    """The same draws for every encoding and every call, so that a page can be made again."""
    draw = draw_tasks if other_tasks else draw_seeds
    return draw(counts, draws, np.random.default_rng(0))


def _freedom(per_task: list[np.ndarray], resolution: float) -> float:
    """Welch's and Satterthwaite's degrees of freedom of a mean over tasks whose seeds vary
    differently."""
    variances = np.array([max(g.var(ddof=1), resolution**2) / len(g) for g in per_task])
    each = np.array([len(g) - 1 for g in per_task])
    if not variances.any():
        return float(each.sum())
    return float(variances.sum() ** 2 / (variances**2 / each).sum())
