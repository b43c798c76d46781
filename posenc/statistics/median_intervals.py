"""Estimate medians with 95 % intervals that hold for any distribution."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Median(NamedTuple):
    """Hold the median of measured values and the ends of its interval."""

    median: float
    low: float
    high: float


def median_with_interval(values: Sequence[float]) -> Median:
    """Return the lower median of one or more values and its 95 % interval.

    The interval has at least this confidence for any distribution: its ends are two of the values,
    chosen by rank, as in the sign test. Below six values it is their range.

    >>> median_with_interval([float(value) for value in range(1, 22)])
    Median(median=11.0, low=6.0, high=16.0)
    """
    sorted_values = sorted(values)
    num_values = len(sorted_values)
    # The median lies below the k-th smallest value if fewer than k of all are below the median,
    # each of which is so with a chance of one half. chances: of this for k = 1, 2, ...
    chances = itertools.accumulate(
        math.comb(num_values, k) / 2**num_values for k in range(num_values)
    )
    # The largest k whose chance is at most half of 5 %, as the interval has two ends; 0 without
    # any.
    rank = sum(chance <= 0.025 for chance in chances)
    low_index = max(rank - 1, 0)  # its index, which counts from 0
    high_index = num_values - 1 - low_index
    return Median(
        statistics.median_low(sorted_values), sorted_values[low_index], sorted_values[high_index]
    )
