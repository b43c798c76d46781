"""Agreement with published orders, held to scipy and to all orders counted by hand."""

import itertools

import numpy as np
import pytest
from scipy import stats

from posenc.statistics.agreement import agreement_p, separated_pairs, sign_agreement, spearman

OURS = {"t5": 1.0, "alibi": 2.0, "rope": 3.0, "sinusoidal": 4.0}


@pytest.mark.parametrize(
    "theirs", [(1, 2, 3, 4), (1, 2, 4, 3), (4, 3, 2, 1), (2, 4, 1, 3), (1, 1, 3, 4)]
)
def test_p_counts_every_order(theirs):
    found = spearman(OURS, dict(zip(OURS, theirs, strict=True)))
    expected = stats.spearmanr([1, 2, 3, 4], theirs).statistic
    every = [
        stats.spearmanr([1, 2, 3, 4], order).statistic for order in itertools.permutations(theirs)
    ]
    above = np.mean([each >= expected - 1e-9 for each in every])
    below = np.mean([each <= expected + 1e-9 for each in every])
    assert found.value == pytest.approx(expected) and found.count == 4
    assert found.p == pytest.approx(min(1, 2 * min(above, below)))


def test_four_encodings_cannot_reach_5_percent():
    assert spearman(OURS, OURS).p == pytest.approx(1 / 12)
    more = OURS | {"nope": 5.0}
    assert spearman(more, more).p == pytest.approx(1 / 60)


def test_many_encodings_are_sampled():
    many = {str(i): float(i) for i in range(12)}
    assert spearman(many, many).p < 0.001
    turned = {name: -value for name, value in many.items()}
    assert spearman(many, turned).value == pytest.approx(-1)


def test_only_encodings_in_common_count():
    assert spearman(OURS, {"t5": 1.0, "rope": 2.0, "fire": 0.0}) is None
    assert spearman(OURS, dict.fromkeys(OURS, 1.0)) is None
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not finite: rope"):
            spearman(OURS | {"rope": wrong}, OURS)
        with pytest.raises(ValueError, match="not finite: rope"):
            sign_agreement(OURS | {"rope": wrong}, [])


def test_pairs_are_those_beyond_the_seeds():
    """KERPLE's OpenWebText2 at four times the length, 5 seeds: T5 and KERPLE are not told apart."""
    means = {"kerple": 21.6, "alibi": 22.5, "t5": 21.7, "rope": 62.4}
    deviations = {"kerple": 0.3, "alibi": 0.2, "t5": 0.2, "rope": 6.1}
    pairs = separated_pairs(means, deviations, 5)
    assert ("kerple", "alibi") in pairs and ("t5", "rope") in pairs and len(pairs) == 5
    assert not any(set(pair) == {"kerple", "t5"} for pair in pairs)
    assert separated_pairs(means, deviations, 1) == []
    assert separated_pairs(means, {"rope": 6.1}, 5) == []
    assert separated_pairs(means, dict.fromkeys(means, float("nan")), 5) == []


def test_sign_agreement_counts_only_encodings_in_common():
    pairs = [("t5", "rope"), ("rope", "alibi"), ("t5", "fire")]
    assert sign_agreement(OURS, pairs) == (1, 2)
    assert sign_agreement(dict.fromkeys(OURS, 1.0), pairs) == (0, 2)  # a tie agrees with nothing


PAIRS = [("t5", "rope"), ("alibi", "rope"), ("t5", "sinusoidal")]


@pytest.mark.parametrize("values", [(1, 2, 3, 4), (3, 2, 1, 4), (4, 3, 2, 1)])
def test_p_of_an_agreement_counts_every_order(values):
    ours = dict(zip(OURS, map(float, values), strict=True))
    found = sign_agreement(ours, PAIRS)[0]
    every = [
        sign_agreement(dict(zip(OURS, order, strict=True)), PAIRS)[0]
        for order in itertools.permutations(ours.values())
    ]
    assert agreement_p([(ours, PAIRS)]) == pytest.approx(np.mean([x >= found for x in every]))


def test_a_table_that_comes_twice_is_no_more_evidence():
    whole = list(itertools.combinations(OURS, 2))
    once, twice = agreement_p([(OURS, whole)]), agreement_p([(OURS, whole)] * 2)
    assert once == twice == pytest.approx(1 / 24)


def test_p_is_of_encodings_that_all_tables_have():
    more = OURS | {"nope": 9.0}
    part = (OURS, [("t5", "rope")])
    assert agreement_p([part, (more, [("t5", "nope"), ("t5", "rope")])]) == pytest.approx(1 / 2)
    assert agreement_p([]) is None and agreement_p([(OURS, [])]) is None


def test_p_of_many_encodings_is_drawn():
    many = {str(i): float(i) for i in range(12)}
    pairs = list(itertools.combinations(many, 2))
    turned = {name: -value for name, value in many.items()}
    assert agreement_p([(many, pairs)]) < 0.001
    assert agreement_p([(turned, pairs)]) == 1.0
