"""Estimates for other tasks against all possible draws, scipy, and simulated truth."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from posenc.statistics import like_tasks
from posenc.statistics.like_tasks import difference_on_like_tasks, probability_of_improvement
from posenc.statistics.pooled import pooled_difference
from posenc.statistics.resample import draw_tasks
from posenc.statistics.scores import Scores
from tests.statistics.simulated import World

NAN = float("nan")


def every_draw(values: np.ndarray):
    """Of (2, tasks, seeds) every choice of tasks, and of seeds in each, all equally likely."""
    _, tasks, seeds = values.shape
    inside = list(itertools.product(range(seeds), repeat=seeds))
    for chosen in itertools.product(range(tasks), repeat=tasks):
        for each in itertools.product(inside, repeat=tasks):
            yield np.stack([values[:, t][:, list(s)] for t, s in zip(chosen, each, strict=True)], 1)


def trimmed(values: np.ndarray) -> float:
    ordered = np.sort(values.ravel())
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def test_its_error_is_that_of_every_draw():
    scores = World(3, seed=2).study(2)
    found = difference_on_like_tasks(scores, "a", "b")
    exact = np.std([trimmed(b) - trimmed(a) for a, b in every_draw(scores.values)])
    assert found.value == pooled_difference(scores, "a", "b").value
    assert found.error == pytest.approx(exact * math.sqrt(3 / 2), rel=0.03)
    assert found.freedom == 2 and found.count == 6
    assert found.half > 1.2 * pooled_difference(scores, "a", "b").half


def test_a_draw_takes_as_many_seeds_as_the_tasks_that_it_drew_have():
    draws = draw_tasks([1, 3], 3000, np.random.default_rng(0))
    sizes = {each.shape[1]: len(each) for each in draws}
    assert sorted(sizes) == [2, 4, 6]  # the first task twice, one of each, the second twice
    assert sizes[4] / 3000 == pytest.approx(0.5, abs=0.04)
    by_size = {each.shape[1]: each for each in draws}
    assert not by_size[2].any() and set(by_size[6].ravel()) == {1, 2, 3}


def test_the_probability_is_mann_whitneys_over_the_pairs_of_each_task():
    scores = World(5, seed=3).study(4)
    a, b = scores.values
    each = [stats.mannwhitneyu(y, x).statistic / 16 for x, y in zip(a, b, strict=True)]
    found = probability_of_improvement(scores, "a", "b")
    assert found.value == pytest.approx(np.mean(each))
    assert probability_of_improvement(scores, "b", "a").value == pytest.approx(1 - found.value)
    same = Scores("ab", range(5), range(4), np.stack([a, a]))
    assert probability_of_improvement(same, "a", "b").value == 0.5


def test_the_interval_of_a_probability_is_that_of_every_draw():
    scores = World(8, seed=7).study(2)
    wins = (scores.values[0][:, :, None] < scores.values[1][:, None, :]).astype(float)
    inside = list(itertools.product(range(2), repeat=4))  # two rows, then two columns
    drawn = [[w[np.ix_(d[:2], d[2:])].mean() for d in inside] for w in wins]
    variance = np.mean(np.square(drawn)) - np.mean(drawn) ** 2  # of a task and seeds that are drawn
    half = stats.t.ppf(0.975, 7) * math.sqrt(variance / 8 * 8 / 7)
    found = probability_of_improvement(scores, "a", "b")
    low, high = found.value - half, found.value + half
    assert 0 < low and high < 1
    assert found.interval == pytest.approx((low, high), rel=0.05)
    other = probability_of_improvement(World(8, seed=8).study(2), "a", "b")
    assert other.interval[0] < other.value < other.interval[1] == 1  # cut


def test_equal_draws_are_no_evidence_for_other_tasks():
    values = np.stack([np.full((4, 3), 0.2), np.full((4, 3), 0.6)])
    scores = Scores("ab", range(4), range(3), values)
    found = probability_of_improvement(scores, "a", "b")
    assert found.value == 1 and found.interval is None
    assert difference_on_like_tasks(scores, "a", "b", 1 / 512).half == math.inf
    values[1, 0, 0] += 1e-6
    close = difference_on_like_tasks(Scores("ab", range(4), range(3), values), "a", "b", 1 / 512)
    assert close.error == 1 / 512 / math.sqrt(12)  # no less than the trials can tell


def test_two_tasks_tell_nothing_of_a_third():
    scores = World(2).study(5)
    difference = difference_on_like_tasks(scores, "a", "b")
    assert not math.isnan(difference.value) and difference.half == math.inf
    share = probability_of_improvement(scores, "a", "b")
    assert 0 <= share.value <= 1 and share.interval is None


def test_what_did_not_learn_is_kept_out():
    scores = World(4).study(3)
    failed = np.zeros(scores.values.shape, bool)
    failed[1, 2] = True
    kept = Scores("ab", range(4), range(3), scores.values, failed)
    without = Scores("ab", [0, 1, 3], range(3), np.delete(scores.values, 2, axis=1))
    for measure in (difference_on_like_tasks, probability_of_improvement):
        assert measure(kept, "a", "b") == measure(without, "a", "b")
        nothing = Scores("ab", [0], [0], [[[NAN]], [[1.0]]])
        assert math.isnan(measure(nothing, "a", "b").value)


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [3, 6])
def test_intervals_hold_what_all_tasks_give_and_those_of_seeds_do_not(tasks, monkeypatch):
    monkeypatch.setattr(like_tasks, "DRAWS", 400)
    like_tasks._draws.cache_clear()
    many = World(200_000, seed=9, apart=0.2)
    a, b = (trimmed(values) for values in many.study(1).values)
    held = held_alone = 0
    for seed in range(200):
        scores = World(tasks, 100 + seed, apart=0.2).study(3)
        found = difference_on_like_tasks(scores, "a", "b")
        held += abs(found.value - (b - a)) <= found.half
        alone = pooled_difference(scores, "a", "b")
        held_alone += abs(alone.value - (b - a)) <= alone.half
    like_tasks._draws.cache_clear()
    assert held >= 0.95 * 200 > 0.9 * 200 > held_alone


def two_kinds(random, tasks, seeds):
    """Two encodings whose seeds succeed or fail, with odds that differ from task to task."""
    odds = random.uniform(0.1, 0.9, tasks)
    better = np.clip(odds + random.normal(0.1, 0.2, tasks), 0, 1)
    kinds = random.random((2, tasks, seeds)) < np.stack([odds, better])[..., None]
    return np.where(kinds, 0.97, 0.03) + random.uniform(-0.03, 0.03, kinds.shape)


def normal(random, tasks, seeds):
    return World(tasks, int(random.integers(1 << 30)), apart=0.2).study(seeds).values


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [3, 4, 6])
@pytest.mark.parametrize("kind", [two_kinds, normal])
def test_intervals_of_both_hold_for_seeds_of_either_kind(kind, tasks, monkeypatch):
    monkeypatch.setattr(like_tasks, "DRAWS", 400)
    like_tasks._draws.cache_clear()
    random = np.random.default_rng(0)
    a, b = kind(random, 100_000, 2)
    gap, above = trimmed(b) - trimmed(a), (a[:, 0] < b[:, 1]).mean()
    held, known = [], []
    for _ in range(150):
        scores = Scores("ab", range(tasks), range(3), kind(random, tasks, 3))
        found = difference_on_like_tasks(scores, "a", "b")
        held.append(abs(found.value - gap) <= found.half)
        interval = probability_of_improvement(scores, "a", "b").interval
        if interval is not None:
            known.append(interval[0] <= above <= interval[1])
    like_tasks._draws.cache_clear()
    assert np.mean(held) >= 0.95
    assert len(known) > 100 and np.mean(known) >= 0.9
