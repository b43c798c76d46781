"""Scores of encodings on tasks with several seeds, with missing and failed trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scores:
    """One number for each encoding, task and seed; higher is better.

    Args:
        encodings, tasks, seeds: names of the three axes, each once.
        values: (encodings, tasks, seeds); NaN where a trial is missing.
        not_learned: the same shape, True where a trial did not learn its task at the training
            lengths. Such trials are left out of every mean.

    Raises: ValueError if shapes do not fit, a name comes twice, a score is infinite, or a missing
    trial is marked as not learned.

    >>> found = Scores(["rope", "alibi"], ["copy"], [0, 1], [[[0.5, 0.7]], [[0.4, float("nan")]]])
    >>> found.counted().sum(axis=-1).tolist()
    [[2], [1]]
    """

    encodings: Sequence[str]
    tasks: Sequence[str]
    seeds: Sequence[int]
    values: np.ndarray
    not_learned: np.ndarray | None = None

    def __post_init__(self) -> None:
        values = np.asarray(self.values, dtype=np.float64)
        failed = np.zeros(values.shape, bool) if self.not_learned is None else self.not_learned
        failed = np.asarray(failed, dtype=bool)
        expected = (len(self.encodings), len(self.tasks), len(self.seeds))
        for name, array in (("values", values), ("not_learned", failed)):
            if array.shape != expected:
                raise ValueError(f"{name}: expected the shape {expected}, got {array.shape}.")
        for axis in (self.encodings, self.tasks, self.seeds):
            if len(set(axis)) < len(axis):
                raise ValueError(f"every name of an axis must come once, got {list(axis)}.")
        if np.isinf(values).any():
            raise ValueError("a score is infinite; give NaN where a trial is missing.")
        if (failed & np.isnan(values)).any():
            raise ValueError("a missing trial cannot be marked as not learned.")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "not_learned", failed)

    def counted(self) -> np.ndarray:
        """Return (encodings, tasks, seeds): True where a trial ran and learned."""
        return ~np.isnan(self.values) & ~np.asarray(self.not_learned)

    def of_tasks(self, kept: np.ndarray) -> Scores:
        """Return the scores of tasks where `kept`, (tasks,), is True."""
        return Scores(
            self.encodings,
            [task for task, keep in zip(self.tasks, kept, strict=True) if keep],
            self.seeds,
            self.values[:, kept],
            np.asarray(self.not_learned)[:, kept],
        )

    def of_both(self, a: str, b: str, least: int) -> Scores:
        """Return the scores of tasks with at least `least` counted seeds of both encodings."""
        rows = [list(self.encodings).index(name) for name in (a, b)]
        return self.of_tasks(self.counted()[rows].all(axis=0).sum(axis=1) >= least)
