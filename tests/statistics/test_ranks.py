"""Rank intervals, tiers and anchors over simulated studies and planted ties."""

import math
from itertools import combinations

import numpy as np
import pytest

from posenc.statistics.anchors import against_anchors
from posenc.statistics.estimate import Estimate
from posenc.statistics.paired import paired_difference
from posenc.statistics.ranks import rank

NAMES = "abcdef"


def ranked(values: dict[str, np.ndarray]):
    pairs = {(a, b): paired_difference(values[a], values[b]) for a, b in combinations(values, 2)}
    return rank({name: float(np.mean(each)) for name, each in values.items()}, pairs)


def studies(means, seeds, count, deviation=1.0):
    random = np.random.default_rng(0)
    for _ in range(count):
        yield {
            name: mean + deviation * random.normal(size=seeds)
            for name, mean in zip(NAMES, means, strict=True)
        }


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_equal_encodings_are_one_tier(seeds):
    """With 95 %: in 100 studies of equal encodings, 5 may see a difference that is none."""
    found = [ranked(study) for study in studies([0] * 6, seeds, 200)]
    wrong = sum(len(each.tiers) > 1 or set(each.ranks.values()) != {(1, 6)} for each in found)
    assert wrong <= 16  # 5 % of 200, and two standard errors


def test_rank_intervals_hold_every_true_rank():
    truth = {name: 6 - i for i, name in enumerate(NAMES)}
    held = tight = 0
    for study in studies([0, 3, 6, 9, 12, 15], 5, 200):
        ranks = ranked(study).ranks
        held += all(low <= truth[name] <= high for name, (low, high) in ranks.items())
        tight += ranks["a"][0] > 1
    assert held >= 184  # 95 % of 200, less two standard errors
    assert tight >= 190  # and they do tell something: a is not the best


def test_what_is_told_apart_is_in_its_own_tier():
    (study,) = studies([0, 0, 50, 50, 100, 100], 5, 1)
    found = ranked(study)
    assert [set(tier) for tier in found.tiers] == [{"e", "f"}, {"c", "d"}, {"a", "b"}]
    assert found.ranks["c"] == (3, 4) and found.tier("c") == 2


def told(*pairs):
    """Rank "a", "b" and "c", of falling estimates, with the first of each pair told above."""
    values = {}
    for a, b in combinations("abc", 2):
        sign = (b, a) in pairs
        known = sign or (a, b) in pairs
        values[a, b] = Estimate(1.0 if sign else -1.0, 0.001 if known else math.inf, 4, 5)
    return rank({"a": 3.0, "b": 2.0, "c": 1.0}, values)


def test_tiers_depend_on_significant_differences_only():
    assert told(("b", "c")).tiers == (("a", "b"), ("c",))  # although none tells c from a
    assert told(("b", "a")).tiers == (("b", "c"), ("a",))  # pairs may stand on other trials
    assert told(("b", "a")).order == ("b", "c", "a")
    assert told(("a", "b"), ("b", "c"), ("a", "c")).tiers == (("a",), ("b",), ("c",))


def test_cycles_of_differences_are_one_tier():
    found = told(("a", "b"), ("b", "c"), ("c", "a"))
    assert found.tiers == (("a", "b", "c"),) and set(found.ranks.values()) == {(2, 2)}


def test_a_tie_is_named_a_tie_although_its_means_differ():
    same = {"a": np.array([1.0, 1.0, 1.0]), "b": np.array([1.0, 1.0, 1.0])}
    assert ranked(same).tiers == (("a", "b"),)
    alone = {"a": np.array([1.0]), "b": np.array([9.0])}
    assert ranked(alone).tiers == (("b", "a"),) and ranked(alone).ranks["a"] == (1, 2)
    missing = {"a": np.array([1.0, np.nan]), "b": np.array([np.nan, 9.0])}
    assert ranked(missing).ranks == {"a": (1, 2), "b": (1, 2)}


def test_all_pairs_are_needed():
    with pytest.raises(ValueError, match=r"missing: \[\('a', 'b'\)\]"):
        rank({"a": 1, "b": 2}, {})


def test_anchors_are_corrected_for_their_number_only():
    p = {("x", "c"): 0.02, ("x", "a"): 0.02, ("x", "b"): 0.5}

    class Known(Estimate):
        @property
        def p(self) -> float:
            return self.value

    found = against_anchors("abcx", "xy", lambda a, b: Known(p[a, b], 0, 0, 0))
    assert {pair: corrected for pair, (_, corrected) in found.items()} == pytest.approx(
        {("x", "a"): 0.06, ("x", "b"): 0.5, ("x", "c"): 0.06}
    )
    both = against_anchors("abx", "xa", lambda a, b: Known(0.01, 0, 0, 0))
    assert list(both) == [("x", "a"), ("x", "b"), ("a", "b")]
    assert against_anchors("ab", "x", lambda a, b: Known(0.01, 0, 0, 0)) == {}
