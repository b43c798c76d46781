"""Holm's correction for multiple comparisons."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def holm(p: Sequence[float]) -> list[float]:
    """Correct p-values for their number; return them in the order given.

    The smallest is multiplied by n, the next by n - 1, and so on, never falling, at most 1. If all
    results at or below 0.05 are called significant, any of them is an error with at most 5 %.

    Raises: ValueError for NaN or a value outside of 0 to 1.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError(f"p-values: expected numbers from 0 to 1, got {list(p)}.")
    order = np.argsort(values, kind="stable")
    steps = np.arange(len(values), 0, -1) * values[order]
    corrected = np.empty_like(values)
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return corrected.tolist()
