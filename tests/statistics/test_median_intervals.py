"""Intervals of medians, held to the binomial distribution of scipy."""

import pytest
from scipy import stats

from posenc.statistics.median_intervals import median_with_interval


@pytest.mark.parametrize(
    ("num_values", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (21, 6, 16), (25, 8, 18)]
)
def test_the_ends_are_the_ranks_of_the_sign_test(num_values, low, high):
    values = [float(value) for value in range(num_values, 0, -1)]
    interval = median_with_interval(values)
    assert interval == ((num_values + 1) // 2, low, high)
    # Both tails beyond the ends have at most 2.5 %, and one rank further in they have more.
    assert stats.binom.cdf(low - 1, num_values, 0.5) <= 0.025
    assert stats.binom.cdf(low, num_values, 0.5) > 0.025


@pytest.mark.parametrize("values", [[3.0], [3.0, 1.0], [5.0, 1.0, 3.0, 2.0, 4.0]])
def test_few_values_have_their_range(values):
    interval = median_with_interval(values)
    assert (interval.low, interval.high) == (min(values), max(values))
