"""Rankings without one of the tasks."""

from __future__ import annotations

import numpy as np

from posenc.statistics.iqm import interquartile_mean
from posenc.statistics.scores import Scores


def leave_one_task_out(scores: Scores) -> dict[str, tuple[int, int]]:
    """Return the best and the worst rank of each encoding over all choices of one task to leave
    out. Ranks are by the interquartile mean of the other tasks; 1 is best, and ties get the better
    rank.

    Unlike a bootstrap, this shows whether one task decides a ranking. Encodings without a trial
    that learned rank last.

    Raises: ValueError with fewer than two tasks.

    >>> values = [[[0.9], [0.1], [0.5]], [[0.1], [0.9], [0.6]]]
    >>> leave_one_task_out(Scores(["nope", "t5"], ["copy", "offset", "recall"], [0], values))
    {'nope': (1, 2), 't5': (1, 2)}
    """
    if len(scores.tasks) < 2:
        raise ValueError(f"leave one task out: expected at least 2 tasks, got {len(scores.tasks)}.")
    every = np.arange(len(scores.tasks))
    ranks = np.array([_ranks(scores.of_tasks(every != left)) for left in every])
    return {
        name: (int(low), int(high))
        for name, low, high in zip(scores.encodings, ranks.min(0), ranks.max(0), strict=True)
    }


def _ranks(scores: Scores) -> list[int]:
    means = [
        float(interquartile_mean(row[counted])) if counted.any() else -np.inf
        for row, counted in zip(scores.values, scores.counted(), strict=True)
    ]
    return [1 + sum(other > mean for other in means) for mean in means]
