"""Pooled scores, held to scipy's bootstrap and to simulated truth."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from posenc.statistics.iqm import interquartile_mean
from posenc.statistics.leave_one_out import leave_one_task_out
from posenc.statistics.paired import paired_difference
from posenc.statistics.pooled import pooled_difference, pooled_score
from posenc.statistics.resample import draw_seeds
from posenc.statistics.scores import Scores
from tests.statistics.simulated import World

NAN = float("nan")


def test_of_one_task_with_three_seeds_it_is_the_paired_difference():
    scores = World(1).study(3)
    pooled, exact = pooled_difference(scores, "a", "b"), paired_difference(*scores.values[:, 0])
    assert pooled.value == pytest.approx(exact.value) and pooled.freedom == exact.freedom
    assert pooled.error == pytest.approx(exact.error, rel=0.03)  # of 10,000 draws


def test_the_bootstrap_is_scipys():
    values = World(1).study(8).values[0, 0]
    theirs = stats.bootstrap(
        (values,), lambda x, axis: interquartile_mean(x), n_resamples=10_000, vectorized=True,
        method="percentile", rng=np.random.default_rng(5),
    )  # fmt: skip
    ours = pooled_score(Scores(["a"], ["task"], range(8), values[None, None]), "a")
    assert ours.error / math.sqrt(8 / 7) == pytest.approx(theirs.standard_error, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_hold_the_truth_and_those_of_percentiles_do_not(seeds, monkeypatch):
    monkeypatch.setattr("posenc.statistics.pooled.DRAWS", 400)
    held = percentiles = studies = 0
    counts = (seeds,) * 6
    draws = draw_seeds(counts, 400, np.random.default_rng(0))
    for seed in range(6):
        world = World(6, seed)
        truth = world.difference(interquartile_mean)
        for _ in range(100):
            scores = world.study(seeds)
            found = pooled_difference(scores, "a", "b")
            held += abs(found.value - truth) <= found.half
            a, b = scores.values.reshape(2, -1)[:, draws]
            low, high = np.percentile(interquartile_mean(b) - interquartile_mean(a), [2.5, 97.5])
            percentiles += low <= truth <= high
            studies += 1
    assert 0.92 <= held / studies <= 0.98  # 0.93 to 0.97, and one standard error of 600 studies
    assert percentiles / studies < 0.92


def test_few_draws_are_exactly_those_that_there_are():
    """Two seeds of two tasks: every draw is one of 16."""
    draws = draw_seeds([2, 2], 4000, np.random.default_rng(0))
    seen, counts = np.unique(draws, axis=0, return_counts=True)
    assert len(seen) == 16 and counts.min() > 150
    assert set(draws[:, :2].ravel()) == {0, 1} and set(draws[:, 2:].ravel()) == {2, 3}


def test_a_tie_stays_a_tie():
    values = np.tile(World(4).study(3).values[:1], (2, 1, 1))
    found = pooled_difference(Scores("ab", range(4), range(3), values), "a", "b")
    assert found.value == 0 and found.p == 1 and found.half == math.inf
    floored = pooled_difference(Scores("ab", range(4), range(3), values), "a", "b", 1 / 512)
    assert floored.p == 1 and 1 / 512 / math.sqrt(12) <= floored.error < 1 / 512


def test_one_seed_of_a_task_says_nothing():
    scores = World(4).study(3)
    alone = scores.values.copy()
    alone[0, 2, 1:] = NAN
    found = pooled_difference(Scores("ab", range(4), range(3), alone), "a", "b")
    assert found.half == math.inf and found.count == 10
    assert pooled_score(World(1).study(1), "a").half == math.inf


def test_what_did_not_learn_is_counted_and_kept_out():
    scores = World(4).study(3)
    failed = np.zeros(scores.values.shape, bool)
    failed[0, 1] = True
    values = scores.values.copy()
    values[0, 1] = 0.0
    kept = Scores("ab", range(4), range(3), values, failed)
    without = Scores("ab", [0, 2, 3], range(3), np.delete(scores.values, 1, axis=1))
    assert pooled_difference(kept, "a", "b") == pooled_difference(without, "a", "b")
    assert kept.counted().sum(axis=-1)[0].tolist() == [3, 0, 3, 3]
    assert pooled_score(kept, "a") != pooled_score(Scores("ab", range(4), range(3), values), "a")
    nothing = Scores("ab", [0], [0], [[[NAN]], [[1.0]]])
    assert math.isnan(pooled_difference(nothing, "a", "b").value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"values": np.zeros((2, 3))}, r"expected the shape \(2, 2, 1\), got \(2, 3\)"),
        ({"tasks": ["x", "x"]}, "must come once"),
        ({"values": np.full((2, 2, 1), np.inf)}, "is infinite"),
        (
            {"values": np.full((2, 2, 1), NAN), "not_learned": np.ones((2, 2, 1))},
            "missing trial cannot",
        ),
    ],
)
def test_wrong_scores_are_refused(change, said):
    given = {"encodings": "ab", "tasks": ["x", "y"], "seeds": [0], "values": np.zeros((2, 2, 1))}
    with pytest.raises(ValueError, match=said):
        Scores(**given | change)


def test_interquartile_mean_is_scipys_and_takes_no_nan():
    values = np.arange(18.0) ** 2
    assert float(interquartile_mean(values)) == pytest.approx(np.mean(values[4:14]))
    for wrong in ([], [1.0, NAN]):
        with pytest.raises(ValueError, match="numbers only"):
            interquartile_mean(np.array(wrong))


def test_one_task_that_decides_is_seen():
    values = np.array([[0.99, 0.5, 0.5], [0.1, 0.6, 0.6], [0.0, NAN, NAN]])[..., None]
    failed = np.zeros((3, 3, 1), bool)
    failed[2, 0] = True
    ranks = leave_one_task_out(Scores("abc", range(3), [0], values, failed))
    assert ranks == {"a": (1, 2), "b": (1, 2), "c": (3, 3)}
    brute = {}
    for left in itertools.combinations(range(3), 2):
        means = values[:2, list(left), 0].mean(axis=1)
        for name, place in zip("ab", stats.rankdata(-means, "min"), strict=True):
            brute.setdefault(name, []).append(int(place))
    assert {n: (min(p), max(p)) for n, p in brute.items()} == {n: ranks[n] for n in "ab"}
    with pytest.raises(ValueError, match="at least 2 tasks, got 1"):
        leave_one_task_out(World(1).study(2))
