"""Paired differences and Holm's correction, held to scipy and to simulated truth."""

import math

import numpy as np
import pytest
from scipy import stats

from posenc.statistics.estimate import Estimate
from posenc.statistics.holm import holm
from posenc.statistics.paired import paired_difference

NAN = float("nan")


@pytest.mark.parametrize("seeds", [2, 3, 5, 12])
def test_it_is_scipys_paired_test(seeds):
    random = np.random.default_rng(seeds)
    a, b = random.normal(size=(2, seeds))
    theirs = stats.ttest_rel(b, a)
    low, high = theirs.confidence_interval(0.95)
    found = paired_difference(a, b)
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.value - found.half, found.value + found.half) == pytest.approx((low, high))


def test_half_widths_of_the_literature():
    """In standard deviations of a difference: 2.48 for 3 seeds, 1.24 for 5."""
    for gaps, expected in (([-1, 0, 1], 2.48), ([-1, -1, 0, 1, 1], 1.24)):
        found = paired_difference([0] * len(gaps), gaps)
        assert found.half / np.std(gaps, ddof=1) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_hold_the_truth_in_95_of_100_studies(seeds):
    random, held, studies = np.random.default_rng(1), 0, 2000
    for _ in range(studies):
        shared = random.normal(size=seeds)
        found = paired_difference(
            shared + random.normal(size=seeds), shared + 0.3 + random.normal(size=seeds)
        )
        held += abs(found.value - 0.3) <= found.half
    assert 0.93 <= held / studies <= 0.97


def test_pairing_takes_out_what_a_seed_does_to_both():
    a = [1.0, 2.0, 3.0]
    assert paired_difference(a, [1.11, 2.10, 3.09]).p < 0.05
    assert paired_difference(a, [2.10, 3.09, 1.11]).p > 0.5  # the same numbers of other seeds


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0], [2.0]),  # one seed
        ([1.0, NAN], [2.0, 3.0]),  # one pair is left
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),  # equal
        ([1.0, 1.0, 1.0], [2.0, 2.0, 2.0]),  # copies of one trial
        ([0.1, 0.2, 0.3], [1.1, 1.2, 1.3]),  # differ by rounding only
        ([], []),
        ([NAN], [1.0]),
    ],
)
def test_unknown_errors_give_infinite_intervals(a, b):
    found = paired_difference(a, b)
    assert found.half == math.inf and found.p == 1


def test_a_resolution_bounds_the_error_of_equal_differences():
    """Accuracies of 0 and 1 in all of three seeds, each over 512 sequences."""
    assert paired_difference([0, 0, 0], [1, 1, 1], resolution=1 / 512).p < 0.001
    assert paired_difference([0, 0, 0], [0, 0, 0.001], resolution=1 / 512).p > 0.05


def test_missing_partners_are_left_out():
    found = paired_difference([1.0, 1.1, NAN, 1.3], [2.0, 2.3, 9.0, 2.2])
    assert found == paired_difference([1.0, 1.1, 1.3], [2.0, 2.3, 2.2]) and found.count == 3
    with pytest.raises(ValueError, match="equal numbers, got 2 and 1"):
        paired_difference([1, 2], [1])


def test_an_unknown_error_is_no_evidence():
    assert Estimate(5.0, math.inf, 0, 1).p == 1 and Estimate(5.0, NAN, 2, 3).p == 1


def test_holm_is_the_published_example():
    """Wright 1992, and R's p.adjust(c(.01, .02, .03, .04), "holm")."""
    assert holm([0.01, 0.02, 0.03, 0.04]) == pytest.approx([0.04, 0.06, 0.06, 0.06])
    assert holm([0.04, 0.001, 0.9]) == pytest.approx([0.08, 0.003, 0.9])
    assert holm([]) == [] and holm([1.0, 1.0]) == [1.0, 1.0]


@pytest.mark.parametrize("wrong", [[NAN], [0.5, -0.1], [1.1]])
def test_holm_refuses_what_is_no_p_value(wrong):
    with pytest.raises(ValueError, match="from 0 to 1"):
        holm(wrong)
