"""Our orders beside those of papers: held to scipy, and to all orders counted by hand."""

import itertools

import numpy as np
import pytest
from scipy import stats

from posenc.compare.results import Study
from posenc.tasks.registry import TASKS
from tests.compare.judging.test_summary import result, study
from tests.compare.reports.test_reports import changed
from tests.compare.test_tasks import result as task_result
from tests.compare.test_tasks import study_of
from tests.test_readme import load_script

pytestmark = pytest.mark.prose

agreement = load_script("agreement")
agreement_p, sign_agreement = agreement.agreement_p, agreement.sign_agreement
separated_pairs, spearman = agreement.separated_pairs, agreement.spearman

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


def scored(means: dict[str, tuple[float, float, float]]) -> Study:
    return study(*(result(name, 0, each) for name, each in means.items()))


def test_agreement_is_counted_over_what_a_publication_separates():
    """At x1 KERPLE's text separates only the sinusoidal; at x2 rope too, at x4 all."""
    given = scored(
        {
            "t5": (1.0, 1.0, 1.5),
            "alibi": (1.1, 1.1, 1.4),  # at x4 before t5, against the publication
            "rope": (1.2, 1.5, 2.0),
            "sinusoidal": (1.3, 3.0, 4.0),
        }
    )
    found = {(a.table.split(" (")[0], a.multiple): a for a in agreement.agreements(given)}
    near = found["KERPLE, OpenWebText2", 1]
    assert (near.agreeing, near.pairs) == (3, 3)
    assert (found["KERPLE, OpenWebText2", 2].agreeing, found["KERPLE, OpenWebText2", 2].pairs) == (
        5,
        5,
    )
    far = found["KERPLE, OpenWebText2", 4]
    assert (far.agreeing, far.pairs, far.rho.value, far.rho.count) == (5, 6, 0.8, 4)
    assert far.rho.p > 0.08
    assert found["ALiBi, WikiText-103 at 512", 2].pairs == 0  # one seed separates nothing
    assert ("ALiBi, WikiText-103 at 512", 4) not in found  # 2,048 was not tested there
    assert ("ALiBi, WikiText-103 at 1024", 4) in found  # 4,024 is within 5 % of 4,096
    assert set(far.separated) >= {("t5", "alibi"), ("alibi", "rope")}
    beyond = [a for a in found.values() if a.multiple > 1]
    agreeing, pairs = sum(a.agreeing for a in beyond), sum(a.pairs for a in beyond)
    assert agreeing < pairs
    assert 0 < agreement.agreement_p([(a.ours, a.separated) for a in beyond]) < 1


def test_agreement_needs_posencs_own_encodings_with_numbers():
    alone = scored({"t5": (1.0, 1.0, 1.0), "nope": (2.0, 2.0, 2.0)})
    assert agreement.agreements(alone) == []
    own = changed(scored({"t5": (1.0, 1.0, 1.0), "rope": (2.0, 2.0, 2.0)}), code="abc")
    assert agreement.agreements(own) == []
    masked = changed(scored({"t5": (1.0, 1.0, 1.0), "rope": (2.0, 2.0, 2.0)}), objective="masked")
    assert agreement.agreements(masked) == []  # the tables are of the next token
    cannot = scored({"t5": (1.0, None, None), "rope": (2.0, None, None)})
    assert {a.multiple for a in agreement.agreements(cannot)} == {1}


def test_tasks_agree_by_the_means_of_all_trials():
    def trials(**far):
        return study_of(
            *(
                task_result(name, seed, (0.5 if name == "alibi" else 1.0, value), "copy_512")
                for name, value in far.items()
                for seed in range(2)
            )
        )

    same = trials(nope=0.9, t5=0.5, alibi=0.3, rope=0.1, sinusoidal=0.1)
    (found,) = agreement.agreements(same)
    assert found.multiple is None and len(found.ours) == 5
    assert (found.agreeing, found.pairs) == (9, 9)  # rope and sinusoidal are both 0 there
    turned = trials(nope=0.1, t5=0.5, rope=0.9)
    assert agreement.agreements(turned)[0].agreeing == 0
    assert agreement.agreements(trials(nope=0.9, fire=0.2)) == []


def test_published_tables_are_whole():
    for table in agreement.read_tables(agreement.TASK_TABLES):
        assert table["task"] in TASKS and {len(each) for each in table["seeds"].values()} == {3}
        assert all(0 <= value <= 1 for each in table["seeds"].values() for value in each)
    for table in agreement.read_tables(agreement.TEXT_TABLES):
        assert table["source"].startswith("arXiv:") and table["lengths"] == sorted(table["lengths"])
        for rows in (table["means"], table["deviations"]):
            assert all(len(row) == len(table["lengths"]) for row in rows.values())
        assert set(table["deviations"]) <= set(table["means"])
        assert bool(table["deviations"]) == (table["seeds"] > 1)
