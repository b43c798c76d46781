"""Who is first at a length, at a task and over all tasks; the published studies."""

import dataclasses
import json
import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from posenc.compare.judging.answer import answer
from posenc.compare.judging.near_far import standings
from posenc.compare.judging.standing import (
    Standing,
    ranks_by_task,
    ranks_without_a_task,
    scores_of_task,
    standing_at,
    standing_of_task,
    standing_of_tasks,
)
from posenc.compare.judging.summary import summarise
from posenc.compare.page.report import report_of
from posenc.compare.results import CaseScore, LengthScore, Study
from posenc.report.report import cell_text, measured_value
from posenc.statistics.seed_intervals import PairwiseComparison
from posenc.tasks.registry import TEXT
from tests.compare.judging.test_summary import TRIAL, result, seeds, study
from tests.compare.test_tasks import result as task_result
from tests.compare.test_tasks import study_of
from tests.experiment import experiment

published_trials = experiment("published_trials")
RESULTS = Path(__file__).parents[3] / "results"
WHOLE = [
    *seeds("t5", (2.0, 2.0, 2.0)),
    *seeds("nope", (3.0, 3.0, 3.0)),
    *seeds("alibi", (2.001, 2.5, 2.001)),
    *seeds("rope", (2.5, None, None)),
]


def verdicts_of_pairs(standing: Standing) -> list[tuple[str, str, str]]:
    """Return every pair (a, b) of a standing with "better", "worse" or "tied", of a."""
    verdicts = []
    for a, b in combinations(standing.order, 2):
        verdict = "tied"
        if (a, b) in standing.worse_pairs:
            verdict = "worse"
        elif (b, a) in standing.worse_pairs:
            verdict = "better"
        verdicts.append((a, b, verdict))
    return verdicts


def test_the_best_is_named_with_those_that_are_tied():
    standing = standing_at(study(*WHOLE), 128)
    assert standing.order == ("t5", "alibi", "rope", "nope")
    assert standing.first_tier == ("t5", "alibi")
    assert standing.tiers == (("t5", "alibi"), ("rope",), ("nope",))
    assert standing.gap("rope").value == pytest.approx(0.5) and standing.tier("nope") == 3
    far = standing_at(study(*WHOLE), 512)
    assert set(far.order) == {"t5", "nope", "alibi"} and far.pairs.kind_of_values == "text"
    assert standing_at(study(*seeds("rope", (2.5, None, None))), 512) is None


def test_tables_and_page_show_what_the_standing_says():
    given = study(*WHOLE)
    table = report_of(dataclasses.replace(given, summary=summarise(given))).tables()["text"]
    rows = {name: cells[:3] for name, *cells in table.rows}
    assert list(rows) == ["t5", "alibi", "nope", "rope"]  # by the longest length
    shown = {name: [cell_text(cell) for cell in cells] for name, cells in rows.items()}
    assert shown == {
        "t5": ["2.000 tied", "2.000 tied", "2.000"],
        "alibi": ["2.001 tied", "2.001 tied", "2.500"],
        "rope": ["2.500 worse", "cannot", "cannot"],
        "nope": ["3.000 worse", "3.000 worse", "3.000"],
    }
    assert rows["nope"][0].second_line.startswith("+1.000 ± 0.0")


def test_one_seed_decides_nothing():
    alone = study(result("rope", 0, (2, 2, 2)), result("t5", 0, (3, 3, 3)))
    standing = standing_at(alone, 128)
    assert standing.first_tier == ("rope", "t5") and standing.gap("t5") == (
        pytest.approx(1.0),
        math.inf,
    )


def test_what_was_not_checked_has_no_place():
    given = dataclasses.replace(study(*WHOLE), unchecked={"t5": "it sees later tokens"})
    assert "t5" not in standing_at(given, 128).order


def test_windows_are_compared_where_every_result_has_them():
    def with_windows(r, missing=False):
        windows = tuple(r.by_length[0].bits_per_byte + 0.1 * (i % 5) for i in range(9))
        first = dataclasses.replace(r.by_length[0], windows=() if missing else windows)
        return dataclasses.replace(r, by_length=(first, *r.by_length[1:]))

    whole = study(*map(with_windows, WHOLE))
    over = standing_at(whole, 128).gaps_over_windows
    assert over["nope", "t5"].value == pytest.approx(1.0) and over["t5", "rope"].value < 0
    assert standing_at(whole, 512).gaps_over_windows == {}
    half = study(*map(with_windows, WHOLE[:-1]), with_windows(WHOLE[-1], missing=True))
    assert standing_at(half, 128).gaps_over_windows == {}


def pairs_that_differ(losses: dict[str, list[float]], spread: float) -> list[int]:
    """The documented formula in other code: plain loops, no least squares. How many pairs it tells
    apart when all are judged, when the best are judged again, and so on."""
    found: list[int] = []
    while len(losses) > 1:
        names, k, n = list(losses), len(losses), len(next(iter(losses.values())))
        freedom, known = (k - 1) * (n - 1), 10 * spread**2
        table = np.array([losses[name] for name in names])
        left = table - table.mean(1)[:, None] - table.mean(0) + table.mean()
        pooled = ((left**2).sum() + known) / (freedom + 10)
        behind = []
        for a, b in combinations(range(k), 2):
            apart = table[a] - table[b]
            own = ((n - 1) * np.var(apart, ddof=1) / 2 + known) / (n - 1 + 10)
            range_ = abs(apart.mean()) / math.sqrt(max(pooled, own) / n)
            is_certain = stats.studentized_range.sf(range_, k, freedom + 10) < 0.025
            if is_certain and abs(apart.mean()) > 0.02:
                behind.append(names[a] if apart.mean() > 0 else names[b])
        found.append(len(behind))
        if not behind:
            break
        losses = {name: losses[name] for name in names if name not in behind}
    return found


def losses_at(given: Study, length: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in given.results:
        for score in each.by_length:
            if score.length == length and score.bits_per_byte is not None:
                found.setdefault(each.config.encoding, []).append(score.bits_per_byte)
    return found


SPREAD = {128: 0.015, 1024: 0.018}


@pytest.mark.parametrize("length", [128, 1024])
def test_the_published_six_are_told_apart_with_two_seeds(length):
    given = Study.from_json((RESULTS / "compare/study.json").read_text(encoding="utf-8"))
    standing = standing_at(given, length)
    pairs = pairs_that_differ(losses_at(given, length), SPREAD[length])
    assert len(standing.worse_pairs) == sum(pairs) >= 8
    assert standing.first_tier == ("t5",)


def todays_run() -> Study:
    """A default run of 2026-11-24: `posenc compare` without options."""
    kept = json.loads(Path(__file__).with_name("default_run.json").read_text(encoding="utf-8"))
    return study(
        *(
            dataclasses.replace(
                result(name, seed, (None,) * 3),
                config=dataclasses.replace(
                    TRIAL, encoding=name, seed=seed, test_lengths=(128, 256, 512, 1024)
                ),
                far=(),
                by_length=tuple(
                    LengthScore(int(n), bits, None if bits is not None else "has 128 positions")
                    for n, bits in losses.items()
                ),
            )
            for name, each in kept["losses"].items()
            for seed, losses in enumerate(each)
        )
    )


@pytest.mark.parametrize("length", [128, 1024])
def test_a_default_run_decides_most_pairs_with_two_seeds(length):
    given = todays_run()
    standing = standing_at(given, length)
    pairs = pairs_that_differ(losses_at(given, length), SPREAD[length])
    assert len(standing.worse_pairs) == sum(pairs) >= 7
    assert answer(given).startswith("Use t5: 2.37 bits (rope +0.14 ± 0.0")


def test_the_published_twelve_are_told_apart_with_three_seeds():
    board = published_trials.study_of(
        published_trials.read_rows(RESULTS / "ablations/text_600.jsonl")
        + published_trials.published_rows()
    )
    text = board.of_task(TEXT)
    for length in (128, 1024):
        standing = standing_at(text, length)
        pairs = pairs_that_differ(losses_at(board, length), SPREAD[length])
        assert len(standing.worse_pairs) == sum(pairs) >= 40
    assert standing_of_tasks(board).first_tier == ("dape", "shaw")


BROKEN = {"rope": (5.0, 4.0, 4.5), "nope": (6.0, 7.5, 6.1)}


def test_what_breaks_does_not_hide_who_is_best():
    best = {"t5": (1.60, 1.61, 1.60), "cope": (1.605, 1.60, 1.61), "alibi": (1.70, 1.71, 1.70)}
    given = study(*(r for n, far in (best | BROKEN).items() for r in seeds_at(n, far)))
    standing = standing_at(given, 512)
    assert len(standing.pairs.significantly_higher) == 7 and standing.first_tier == ("t5", "cope")
    assert ("alibi", "t5") in standing.worse_pairs - standing.pairs.significantly_higher and (
        "cope",
        "t5",
    ) not in standing.worse_pairs
    gap = standing.gap("alibi")
    assert (
        gap == standing.among_best.pairs.gap("alibi", "t5")
        and gap.half_width < 0.1 < standing.pairs.least_significant_gap
    )
    again = standing.among_best.pairs.gap("cope", "t5")
    assert standing.gap("cope").value == pytest.approx(again.value)
    assert standing.gap("cope").half_width <= again.half_width
    assert standing.gap("rope", "alibi") == standing.pairs.gap("rope", "alibi")
    assert (
        standing.least_significant_gap == standing.among_best.among_best.pairs.least_significant_gap
    )
    assert standing.least_significant_gap <= gap.half_width * (
        1 + 1e-12
    )  # which another numpy rounds otherwise


def seeds_at(name, far):
    return [result(name, seed, (1.6 + seed / 100, None, bits)) for seed, bits in enumerate(far)]


def test_seeds_that_are_missing_do_not_move_a_mean_from_its_place():
    given = seeds("t5", (2.0, 2.0, 2.0)) + seeds("rope", (2.1, 2.1, 2.1))
    standing = standing_at(study(*given[:-1]), 128)
    means = [standing.mean(name) for name in standing.order]
    assert means == sorted(means) == pytest.approx([2.0, 2.1], abs=0.02)
    broken = {"rope": (5.0, 5.0, 4.0), "nope": (6.0, 6.1, 5.5)}
    best = {"t5": (1.60, 1.605, 1.60), "fire": (1.61, 1.605, 1.61), "alibi": (1.70, 1.705)}
    given = study(*(r for n, far in (best | broken).items() for r in seeds_at(n, far)))
    far = standing_at(given, 512)
    assert far.order[:3] == ("t5", "fire", "alibi") and far.first_tier == ("t5", "fire")
    for name in far.among_best.order:
        assert far.gap(name).value == pytest.approx(far.mean(name) - far.mean("t5"), abs=1e-9)
    assert far.mean("alibi") == pytest.approx(1.7025, abs=0.003)
    zero = Standing(
        "", PairwiseComparison({"a": {0: 0.1, 1: -0.1}, "b": {0: -0.1, 1: 0.1}}, "text")
    )
    assert zero.order == ("a", "b") and str(zero.mean("a")) == str(zero.mean("b")) == "0.0"


def test_the_table_has_the_means_of_the_answer_where_a_trial_is_missing():
    whole = [(name, seed) for name in ("t5", "rope") for seed in range(3)]
    part = study(*(result(name, seed, [2 + seed, 3 + seed, 4]) for name, seed in whole[:-1]))
    table = report_of(dataclasses.replace(part, summary=summarise(part))).tables()["text"]
    near, far = standings(part)
    for name, *losses in table.rows:
        assert measured_value(losses[0]).value == near.mean(name)
        assert measured_value(losses[1]).value == far.mean(name)


def test_an_interval_includes_zero_for_the_tied_where_a_trial_is_missing():
    losses = {
        "t5": {1: 1.97, 2: 1.95},
        "fire": {0: 2.01, 1: 2.09, 2: 2.14},
        "alibi": {0: 2.1, 1: 2.12, 2: 2.13},
        "nope": {0: 2.97, 1: 3.08, 2: 2.97},
    }
    standing = Standing("", PairwiseComparison(losses, "text"))
    assert standing.among_best and standing.first_tier == ("t5", "fire")
    assert not standing.gap("fire", "t5").significant


def test_no_encoding_is_before_one_that_it_is_worse_than():
    """The best have no trial of the seed at which all that break are better than at the others."""
    good = {"t5": (1.60, 1.605), "fire": (1.61, 1.605), "alibi": (1.70, 1.702)}
    broken = {
        n: (far + 1, far + 1.01, far - 2)
        for n, far in zip("abcd", (1.2, 1.5, 1.8, 2.1), strict=True)
    }
    given = study(*(r for n, far in (good | broken).items() for r in seeds_at(n, far)))
    far = standing_at(given, 512)
    assert far.among_best and far.order[0] in far.first_tier
    assert not any((one, other) in far.worse_pairs for one, other in combinations(far.order, 2))
    for name in far.order:
        assert far.gap(name).value == pytest.approx(far.mean(name) - far.mean("t5"), abs=1e-9)


def of_tasks(scores, tasks=("copy", "reverse", "recall"), failed=()):
    """Trials of each task: by encoding one number for each seed."""
    return study_of(
        *(
            task_result(name, seed, (0.5 if (name, seed, task) in failed else 1.0, value), task)
            for task in tasks
            for name, values in scores.items()
            for seed, value in enumerate(values)
        )
    )


def test_every_trial_of_a_task_enters_learned_or_not():
    given = of_tasks({"t5": (0.9, 0.1), "rope": (0.2, 0.3)}, failed={("t5", 1, "copy")})
    assert scores_of_task(given, "copy") == {"t5": {0: 0.9, 1: 0.1}, "rope": {0: 0.2, 1: 0.3}}
    cannot = [
        dataclasses.replace(r, by_case=(r.by_case[0], CaseScore(8, cannot="it has 4 positions")))
        if r.config.encoding == "rope"
        else r
        for r in given.results
    ]
    assert list(scores_of_task(dataclasses.replace(given, results=tuple(cannot)), "copy")) == ["t5"]


def test_a_task_is_judged_by_the_seeds_that_all_have():
    """Shaw's three trials had a mean of 1.08 while the hard seeds of others counted."""
    scores = {"shaw": [0.98, 0.99, 0.97], "rope": [0.6, 0.5, 0.7, 0.1, 0.2], "t5": [0.3, 0.2, 0.4]}
    standing = standing_of_task(of_tasks(scores), "copy")
    assert {name: standing.mean(name) for name in scores} == {"shaw": 0.98, "rope": 0.6, "t5": 0.3}
    assert standing.gap("rope").value == pytest.approx(0.6 - 0.98)


def test_no_encoding_is_left_out_if_fewer_than_two_seeds_are_shared():
    scores = {"rope": [0.9], "t5": [0.2, 0.3, 0.1, 0.9, 1.0], "nope": [0.1, 0.2, 0.1, 0.9, 0.9]}
    standing = standing_of_task(of_tasks(scores), "copy")
    assert set(standing.order) == set(scores) and standing.mean("rope") == 1.0  # and not 1.2
    apart = of_tasks({"rope": [0.9, 0.8], "t5": [0.2, 0.3, 0.1, 0.2]})
    t5 = [r for r in apart.results if r.config.encoding == "t5" and r.config.seed < 2]
    apart = dataclasses.replace(apart, results=tuple(r for r in apart.results if r not in t5))
    assert set(standing_of_task(apart.of_task("copy"), "copy").order) == {"rope", "t5"}
    assert answer(apart.of_task("copy"))  # with words, not an error


@pytest.mark.parametrize(("count", "decided"), [(2, False), (4, False), (6, True)])
def test_few_seeds_of_a_task_decide_nothing(count, decided):
    """Half of the studies of two seeds would find a difference that is none, where the trials of
    one encoding succeed or fail by chance."""
    far = [0.95 - 0.01 * (i % 3) for i in range(count)]
    low = [0.05 + 0.01 * (i % 2) for i in range(count)]
    standing = standing_of_task(of_tasks({"t5": far, "rope": low, "nope": low[::-1]}), "copy")
    assert standing.order[0] == "t5" and bool(standing.worse_pairs) is decided
    assert standing.first_tier == (("t5",) if decided else standing.order)


def test_a_trial_that_did_not_learn_is_behind_all_that_did():
    scores = {"fox": (0.99, 0.99), "t5": (0.5, 0.5), "rope": (0.1, 0.1)}
    failed = {("fox", seed, task) for seed in (0, 1) for task in ("copy", "reverse")}
    ranks = ranks_by_task(of_tasks(scores, failed=failed))
    assert [ranks["copy"][name][0] for name in scores] == [3, 1, 2]
    assert [ranks["recall"][name][0] for name in scores] == [1, 2, 3]
    both = ranks_by_task(of_tasks(scores, failed=failed | {("rope", 0, "copy")}))
    assert [both["copy"][name][0] for name in scores] == [2.5, 1, 2.5]


def test_ranks_over_all_tasks_need_all_tasks():
    scores = {"t5": (0.9, 0.8), "rope": (0.1, 0.3), "nope": (0.2, 0.2)}
    given = of_tasks(scores)
    gone = [r for r in given.results if (r.config.encoding, r.config.task) != ("nope", "copy")]
    partly = dataclasses.replace(given, results=tuple(gone))
    assert set(standing_of_tasks(partly).order) == {"t5", "rope"}
    assert standing_of_tasks(of_tasks(scores, tasks=("copy", "recall"))) is None
    standing = standing_of_tasks(given)
    assert standing.where == "3 tasks" and standing.mean("t5") == 1.0
    assert standing.order[0] == "t5" and standing.pairs.kind_of_values == "tasks"


def test_one_task_that_decides_a_place_shows():
    scores = {"t5": (1.0, 0.1, 0.1), "rope": (0.0, 0.2, 0.2)}
    given = study_of(
        *(
            task_result(name, 0, (1.0, value), task)
            for name, values in scores.items()
            for task, value in zip(("copy", "reverse", "recall"), values, strict=True)
        )
    )
    assert ranks_without_a_task(given) == {"t5": (1, 2), "rope": (1, 1)}


def test_text_is_ranked_by_its_loss_beyond_the_training_length():
    board = published_trials.study_of(
        published_trials.read_rows(RESULTS / "ablations/text_600.jsonl")
        + published_trials.published_rows()
    )
    ranks = ranks_by_task(board)[TEXT]
    assert ranks["t5"][0] <= 2 and ranks["sinusoidal"][0] >= 10 and "learned" not in ranks
    text = (RESULTS / "ablations/text_600.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line)["result"] for line in text.splitlines()]
    bits = {
        r["config"]["encoding"]: np.mean([s["bits_per_byte"] for s in r["by_length"][1:]])
        for r in rows
        if r["config"]["task"] == TEXT
        and r["config"]["seed"] == 0
        and r["config"]["encoding"] in ranks
    }
    assert {name: ranks[name][0] for name in bits} == dict(
        zip(bits, stats.rankdata(list(bits.values())), strict=True)
    )
