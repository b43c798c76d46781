"""Differences of all pairs, held to scipy, to other least squares and to simulated studies."""

import csv
import math
from importlib import resources
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from posenc.statistics.seed_intervals import (
    Gap,
    PairwiseComparison,
    Prior,
    RelativeSpread,
    group_into_tiers,
    half_width_by_spreads,
    significance_level,
    studentized_range_quantile,
)
from tests.experiment import experiment

levels = experiment("levels")
NAN = float("nan")
ROWS = list(
    csv.DictReader(
        resources.files("posenc.statistics").joinpath("levels.csv").read_text().splitlines()
    )
)


def study(values, where="text"):
    return PairwiseComparison(
        {
            f"e{i}": {seed: float(v) for seed, v in enumerate(row) if not np.isnan(v)}
            for i, row in enumerate(values)
        },
        where,
    )


def drawn(k, n, seed=0, apart=0.0):
    random = np.random.default_rng(seed)
    return random.normal(size=(k, n)) + apart * np.arange(k)[:, None] + random.normal(size=n)


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_two_encodings_are_compared_by_the_paired_t(n):
    a, b = drawn(2, n, n)
    found = study([a, b])
    confidence = 1 - significance_level("text", 2, n)
    low, high = stats.ttest_rel(a, b).confidence_interval(confidence)
    gap = found.gap("e0", "e1")
    assert (gap.value - gap.half_width, gap.value + gap.half_width) == pytest.approx((low, high))
    assert found.degrees_of_freedom == n - 1


@pytest.mark.quick(2)
@pytest.mark.parametrize(("k", "n"), [(3, 2), (12, 5), (6, 3)])
def test_a_whole_study_is_tukeys_with_the_seeds_taken_out(k, n):
    """Tukey's own test knows no seeds: its error has their degrees of freedom too."""
    values = drawn(k, n, 7)
    found = study(values)
    theirs = stats.tukey_hsd(*(values - values.mean(0)))
    interval = theirs.confidence_interval(1 - found.level)
    halves = (interval.high - interval.low) / 2
    own_error = studentized_range_quantile(found.level, k, k * (n - 1))
    scale = studentized_range_quantile(found.level, k, found.degrees_of_freedom) / own_error
    scale *= math.sqrt(k * (n - 1) / found.degrees_of_freedom)
    assert found.degrees_of_freedom == (k - 1) * (n - 1)
    held = 0
    for i, j in combinations(range(k), 2):
        gap = found.gap(f"e{i}", f"e{j}")
        assert gap.value == pytest.approx(theirs.statistic[i, j])
        assert gap.half_width >= scale * halves[i, j] * (1 - 1e-9)
        if np.var(values[i] - values[j], ddof=1) / 2 <= found.least_significant_gap**2:
            held += gap.half_width == pytest.approx(scale * halves[i, j])
    assert held and found.least_significant_gap == pytest.approx(scale * halves[0, 1])


def test_a_pair_that_varies_more_than_the_others_is_judged_by_its_own_seeds():
    quiet = 0.01 * drawn(6, 3, 3)
    quiet[0] += [3.0, -3.0, 0.5]
    found = study(quiet)
    own = np.var(quiet[0] - quiet[1], ddof=1) / 2
    width = studentized_range_quantile(found.level, 6, 10) * math.sqrt(own / 3)
    assert found.gap("e0", "e1").half_width == pytest.approx(width)
    assert (
        found.gap("e1", "e2").half_width == pytest.approx(found.least_significant_gap)
        and found.least_significant_gap < width
    )


def test_missing_trials_are_left_out_by_least_squares():
    values = drawn(5, 4, 11)
    values[0, 1] = values[2, 3] = values[4, 0] = values[4, 1] = NAN
    found = study(values)
    cells = np.argwhere(~np.isnan(values))
    design = np.zeros((len(cells), 8))  # an intercept, and all but the first of both
    design[:, 0] = 1
    for row, (i, j) in enumerate(cells):
        design[row, i] = design[row, i] or float(i > 0)
        if j:
            design[row, 4 + j] = 1
    y = values[tuple(cells.T)]
    beta, left, *_ = np.linalg.lstsq(design, y, rcond=None)
    assert found.degrees_of_freedom == len(y) - 8
    covariance = float(left[0]) / found.degrees_of_freedom * np.linalg.inv(design.T @ design)
    for i, j in combinations(range(5), 2):
        contrast = np.zeros(8)
        contrast[[i, j]] = float(i > 0), -1
        gap = found.gap(f"e{i}", f"e{j}")
        assert gap.value == pytest.approx(contrast @ beta)
        apart = values[i] - values[j]
        own = np.nanvar(apart, ddof=1) / 2 if (~np.isnan(apart)).sum() > 1 else 0.0
        error = contrast @ covariance @ contrast
        error *= max(1.0, own * found.degrees_of_freedom / float(left[0]))
        quantile = studentized_range_quantile(found.level, 5, found.degrees_of_freedom)
        assert gap.half_width == pytest.approx(quantile * math.sqrt(error / 2))
    ranks = study(values, "tasks")
    # 8 degrees of freedom are those of 3 whole seeds
    assert ranks.level == significance_level("tasks", 5, 3)


@pytest.mark.parametrize(
    "values",
    [
        [[1.0], [2.0]],  # one seed
        [[1.0, NAN], [NAN, 2.0]],  # no seed of both
        [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0], [9.0, 9.0, 9.0]],  # copies
        [[1.0, 1.5, 1.1], [2.0, 2.5, 2.1]],  # a copy, and something added
        [[1.0, 1.2]],  # one encoding
    ],
)
def test_without_a_spread_nothing_is_claimed(values):
    found = study(values)
    assert found.least_significant_gap == math.inf and not found.significantly_higher
    for a, b in combinations(found.names, 2):
        assert found.gap(a, b).half_width == math.inf and not found.gap(a, b).significant


@pytest.mark.parametrize(("difference", "told"), [(2.2e-9, False), (4e-4, False), (6e-4, True)])
def test_a_difference_that_prints_as_nothing_is_none(difference, told):
    """One formula computed in two orders differs by its rounding, alike in all seeds."""
    values = [7.878331383, 7.954748367, 7.91]
    shares = (1.0, 1.1, 1.05)
    other = [value + difference * share for value, share in zip(values, shares, strict=True)]
    pairs = PairwiseComparison({"a": dict(enumerate(values)), "b": dict(enumerate(other))}, "text")
    assert pairs.significantly_higher == ({("b", "a")} if told else set())
    assert pairs.least_significant_gap >= 5e-4


def test_seeds_that_no_other_encoding_has_join_nothing():
    values = drawn(4, 6, 2)
    values[:2, 3:] = values[2:, :3] = NAN  # two studies of two encodings
    found = study(values)
    assert found.gap("e0", "e1").half_width < math.inf == found.gap("e0", "e2").half_width


@pytest.mark.parametrize("wrong", [NAN, math.inf])
def test_what_is_no_number_is_refused(wrong):
    with pytest.raises(ValueError, match="t5: expected numbers, got"):
        PairwiseComparison({"t5": {0: wrong}, "rope": {0: 1.0}}, "text")
    assert not Gap(NAN, 1.0).significant and not Gap(1.0, NAN).significant


def test_tiers_stand_on_what_is_significant_and_not_on_means():
    assert group_into_tiers("abc", frozenset({("c", "b")})) == (("a", "b"), ("c",))
    circle = frozenset({("a", "b"), ("b", "c"), ("c", "a")})
    assert group_into_tiers("abc", circle) == (("a", "b", "c"),)
    steps = frozenset({("b", "a"), ("c", "b"), ("c", "a")})
    assert group_into_tiers("abc", steps) == (("a",), ("b",), ("c",))


def test_no_world_of_the_table_has_more_than_seven_false_alarms_in_a_hundred():
    cells = {(row["where"], int(row["encodings"]), int(row["seeds"])): row for row in ROWS}
    kinds = {where for where, _, _ in cells}
    assert kinds == {"task", "tasks"}
    assert all((w, k, n) in cells for w in kinds for k in range(2, 17) for n in range(2, 9))
    for row in ROWS:
        if row["level"]:
            assert 0 < float(row["level"]) <= 0.05 and float(row["false_alarms"]) <= 0.07


def test_levels_of_studies_that_the_table_does_not_have():
    assert significance_level("tasks", 20, 5) == significance_level("tasks", 24, 5)
    half = significance_level("tasks", 48, 5) / 2
    assert significance_level("tasks", 96, 5) == pytest.approx(half)
    assert significance_level("tasks", 6, 20) == significance_level("tasks", 6, 8)
    assert significance_level("text", 6, 1) is None
    assert {significance_level("text", k, n) for k in (2, 13) for n in (2, 9)} == {0.025}
    assert all(significance_level("task", 6, n) is None for n in (2, 3, 4))


PRIOR = Prior(spread=0.02, degrees_of_freedom=6)


def test_what_is_known_of_the_spread_counts_as_more_degrees_of_freedom():
    """The formula in plain loops: both variances are means weighted by degrees of freedom."""
    values = 0.01 * drawn(4, 3, 8)
    values[1] += [0.3, -0.3, 0.1]
    found = PairwiseComparison(
        {f"e{i}": dict(enumerate(row)) for i, row in enumerate(values)}, "text", 0, PRIOR
    )
    residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    pooled = ((residuals**2).sum() + 6 * 0.02**2) / (6 + 6)
    quantile = stats.studentized_range.isf(0.025, 4, 6 + 6)
    for i, j in combinations(range(4), 2):
        of_pair = np.var(values[i] - values[j], ddof=1) / 2
        moderated = (2 * of_pair + 6 * 0.02**2) / (2 + 6)
        half = quantile * math.sqrt(max(pooled, moderated) / 3)
        assert found.gap(f"e{i}", f"e{j}").half_width == pytest.approx(half, rel=1e-6)


def test_two_seeds_that_are_alike_by_chance_decide_nothing_small_and_what_is_far_apart():
    close = {"a": {0: 2.0, 1: 2.0001}, "b": {0: 2.01, 1: 2.0102}, "c": {0: 2.3, 1: 2.3001}}
    assert PairwiseComparison(close, "text").significantly_higher == {
        ("b", "a"),
        ("c", "a"),
        ("c", "b"),
    }
    assert PairwiseComparison(close, "text", 0, PRIOR).significantly_higher == {
        ("c", "a"),
        ("c", "b"),
    }
    copies = {"a": {0: 2.0, 1: 2.0}, "b": {0: 3.0, 1: 3.0}}
    assert not PairwiseComparison(copies, "text", 0, PRIOR).significantly_higher
    assert not PairwiseComparison(
        {"a": {0: 2.0}, "b": {0: 3.0}}, "text", 0, PRIOR
    ).significantly_higher


@pytest.mark.parametrize(("k", "n"), [(2, 4), (6, 2), (6, 3)])
def test_the_simulation_judges_as_the_library_does(k, n):
    random = np.random.default_rng(5)
    values = random.normal(size=(60, k, n)) + random.choice([0, 0, 3], size=(60, k, 1))
    quantile = studentized_range_quantile(significance_level("tasks", k, n), k, (k - 1) * (n - 1))
    simulated = levels.largest(values) > quantile
    assert [
        bool(study(each, "tasks").significantly_higher) for each in values
    ] == simulated.tolist()
    assert 5 < simulated.sum() < 55


def test_two_thousand_trials_are_compared_in_one_pass():
    """Two-way residuals in closed form, for 400 encodings of five seeds."""
    values = drawn(400, 5, 3, 0.05)
    found = study(values)
    residuals = values - values.mean(1, keepdims=True) - values.mean(0) + values.mean()
    pooled = (residuals**2).sum() / (399 * 4)
    quantile = studentized_range_quantile(found.level, 400, 399 * 4)
    means = values.mean(1)
    expected = set()
    for i in range(400):
        own = np.var(values[i] - values, axis=1, ddof=1) / 2
        halves = quantile * np.sqrt(np.maximum(pooled, own) / 5)
        expected |= {(f"e{i}", f"e{j}") for j in np.flatnonzero(means[i] - means > halves)}
    assert found.significantly_higher == expected and len(expected) > 10_000


def test_differences_are_determined_by_chains_of_shared_seeds_as_the_design_says():
    """A difference is determined if the projector on the design's row space does not change it."""
    random = np.random.default_rng(3)
    for _ in range(60):
        is_there = random.random((6, 5)) < random.choice([0.25, 0.5])
        is_there[np.arange(6), random.integers(5, size=6)] = True  # each has a seed
        present_seeds = np.flatnonzero(is_there.any(0))
        values = {
            f"e{i}": {int(seed): float(random.normal()) for seed in np.flatnonzero(is_there[i])}
            for i in range(6)
        }
        rows = [
            np.concatenate([np.eye(6)[i], np.eye(5)[seed][present_seeds]])
            for i, seed in np.argwhere(is_there)
        ]
        design = np.array(rows)
        projector = np.linalg.pinv(design) @ design
        found = PairwiseComparison(values, "text", prior=Prior(0.1, 10))
        assert found.degrees_of_freedom == len(rows) - np.linalg.matrix_rank(design)
        if found.level is None:
            continue
        for i, j in combinations(range(6), 2):
            difference = np.zeros(len(projector))
            difference[[i, j]] = 1, -1
            is_determined = np.allclose(projector @ difference, difference)
            assert math.isfinite(found.gap(f"e{i}", f"e{j}").half_width) == is_determined


@pytest.mark.parametrize("leads", [[0.03, 0.05, 0.01], [0.1, 0.11, 0.08, 0.14, 0.02]])
def test_half_by_the_spread_of_one_place_is_students_interval_of_a_mean(leads):
    spread = RelativeSpread(float(np.std(leads, ddof=1)) / 0.02, len(leads) - 1)
    _, high = stats.ttest_1samp(leads, 0.0).confidence_interval(1 - 0.036)
    half_width = half_width_by_spreads([spread], len(leads), 0.036)
    assert 0.02 * half_width == pytest.approx(high - np.mean(leads), rel=1e-9)


def test_half_by_the_spreads_of_two_places_takes_the_mean_variance_and_all_degrees_of_freedom():
    half_width = half_width_by_spreads([RelativeSpread(1.0, 2), RelativeSpread(3.0, 1)], 3, 0.05)
    # 3.182446 is the 97.5 % quantile of Student's t with three degrees of freedom.
    assert half_width == pytest.approx(3.182446 * math.sqrt((1 + 9) / 2 / 3), rel=1e-6)
