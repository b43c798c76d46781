"""All tasks of a study together: which trials count, what is shown, and where."""

import dataclasses
import html
import io

import numpy as np
import pytest
from rich.console import Console

from posenc.compare.judge import pooled
from posenc.compare.judge.summary import summarise_tasks
from posenc.compare.judge.verdict import say_for_what
from posenc.compare.page import tables
from posenc.compare.page.page import make_page
from posenc.compare.page.task_page import every_trial
from posenc.statistics.ranks import rank
from posenc.statistics.scores import Scores
from tests.compare.test_tasks import result, study_of

FAR = {  # the score beyond the training length in each of three seeds
    ("rope", "copy"): (0.5, 0.6, 0.7),
    ("rope", "reverse"): (0.3, 0.3, 0.3),
    ("t5", "copy"): (0.7, 0.8, 0.9),
    ("t5", "reverse"): (0.1, 0.1, 0.1),
    ("fire", "copy"): (0.4, 0.4, 0.4),
    ("fire", "reverse"): (0.9, 0.9, 0.9),
}
NOT_LEARNED = {("fire", "reverse")}


def trials(*tasks, far=FAR):
    return [
        result(encoding, seed, (0.5 if (encoding, task) in NOT_LEARNED else 1.0, value), task)
        for (encoding, task), values in far.items()
        if task in tasks
        for seed, value in enumerate(values)
    ]


def whole(**changes):
    study = study_of(*trials("copy", "reverse"))
    return dataclasses.replace(study, tasks=summarise_tasks(study), **changes)


def test_only_what_learned_counts_and_one_task_can_decide():
    header, *rows = pooled.pooled_rows(whole())
    assert header == [
        "encoding", "tier", "rank", "trials", "pooled", "one task left out", "against rope",
    ]  # fmt: skip
    found = {row[0]: row[1:] for row in rows}
    assert found["fire"][2:5] == ["3/6", "0.400 ± 0.005", "3"]
    assert found["rope"][2] == found["t5"][2] == "6/6"
    assert found["rope"][4] == found["t5"][4] == "1–2"
    assert found["rope"][3].startswith("0.425 ± ") and found["t5"][3].startswith("0.425 ± ")
    assert found["rope"][5] == "–" and " ± " in found["t5"][5]
    assert found["fire"][5] == "-0.200, too little in common"  # copy alone


def test_tiers_and_ranks_are_of_what_the_seeds_tell():
    apart = {("t5", task): (0.90, 0.92, 0.91) for task in ("copy", "reverse")}
    apart |= {("rope", task): (0.50, 0.53, 0.51) for task in ("copy", "reverse")}
    apart |= {("fire", task): (0.52, 0.50, 0.51) for task in ("copy", "reverse")}
    found = {row[0]: row[1:3] for row in pooled.pooled_rows(study_of(
        *trials("copy", "reverse", far=apart)
    ))[1:]}  # fmt: skip
    assert found["t5"] == ["1", "1–2"] and found["rope"] == ["2", "2–3"]
    assert found["fire"] == ["1", "1–3"]  # has one task in common with them, and is told from none


def test_seeds_that_are_equal_have_the_error_of_512_sequences():
    equal = {key: (value[0],) * 3 for key, value in FAR.items()}
    found = pooled.pooled_rows(study_of(*trials("copy", "reverse", far=equal)))
    halves = [row[4].partition(" ± ")[2] for row in found[1:]]
    assert all(0.0005 < float(half) < 0.006 for half in halves)


@pytest.mark.parametrize(
    "study",
    [
        study_of(*trials("copy")),
        study_of(*(result(exact=(0.5, 0.9), task=task) for task in ("copy", "reverse"))),
    ],
    ids=["one task", "nobody learned"],
)
def test_there_is_nothing_to_pool(study):
    assert pooled.pooled_rows(study) == [] and tables.pooled_tables(study) == []


def test_what_cannot_run_a_test_and_what_was_not_checked_are_kept_out():
    study = whole(unchecked={"t5": "it sees later tokens"})
    assert [row[0] for row in pooled.pooled_rows(study)[1:]] == ["rope", "fire"]
    cannot = [
        dataclasses.replace(r, by_case=(r.by_case[0], dataclasses.replace(
            r.by_case[1], exact_match=None, token_accuracy=None, cannot="it has 5 positions"
        ))) if r.config.encoding == "fire" else r
        for r in study.results
    ]  # fmt: skip
    last = pooled.pooled_rows(dataclasses.replace(study, results=tuple(cannot)))[-1]
    assert last == ["fire", "–", "–", "0/6", "–", "–", "no seed of both"]


def test_one_seed_has_no_interval():
    study = study_of(*(r for r in trials("copy", "reverse") if r.config.seed == 0))
    found = {row[0]: row[1:] for row in pooled.pooled_rows(study)[1:]}
    assert found["fire"] == ["1", "1–3", "1/2", "0.400", "3", "-0.100, one seed"]


@pytest.mark.parametrize("seeds, at_most", [(3, 0.0), (5, 0.1)])
def test_equal_encodings_whose_seeds_come_in_two_kinds_are_seldom_told_apart(seeds, at_most):
    random, told, studies = np.random.default_rng(0), 0, 200
    for _ in range(studies):
        kinds = random.random((6, 1, seeds)) < 0.5
        values = np.where(kinds, 0.97, 0.03) + random.uniform(-0.03, 0.03, kinds.shape)
        scores = Scores([f"e{i}" for i in range(6)], ["copy"], list(range(seeds)), values)
        ranks = rank(*pooled.task_scores(scores, "copy")).ranks
        told += len(set(ranks.values())) > 1
    assert told <= at_most * studies


def test_two_seeds_of_a_task_tell_nothing_from_an_anchor():
    rows = pooled.pooled_rows(study_of(*(r for r in whole().results if r.config.seed < 2)))
    found = {row[0]: row[-1] for row in rows[1:]}
    assert found["t5"].endswith(", too little in common") and found["rope"] == "–"


def test_a_task_that_one_of_two_seldom_learned_is_left_out_of_what_they_differ_by():
    three = {
        (name, task): tuple(value + 0.01 * i for i in range(3))
        for name, value in (("rope", 0.4), ("t5", 0.5))
        for task in ("copy", "reverse", "recall")
    }
    once = trials("copy", "reverse", "recall", far=three)
    once = [
        dataclasses.replace(r, by_case=(dataclasses.replace(r.by_case[0], exact_match=0.5),
                                        *r.by_case[1:]))
        if (r.config.encoding, r.config.task) == ("t5", "recall") and r.config.seed else r
        for r in once
    ]  # fmt: skip
    found = {row[0]: row for row in pooled.pooled_rows(study_of(*once))[1:]}
    assert found["t5"][3] == "7/9" and found["t5"][-1].startswith("+0.100 ± ")
    two = [r for r in once if r.config.task != "copy"]
    found = {row[0]: row for row in pooled.pooled_rows(study_of(*two))[1:]}
    assert found["t5"][-1] == "+0.100, too little in common"
    study = study_of(*two)
    assert set(rank(*pooled.pooled_scores(pooled.scores_of(study))).ranks.values()) == {(1, 2)}


def test_one_task_is_not_all_of_them_however_many_are_planned():
    begun = study_of(*trials("copy"), result("rope", 0, (1.0, 0.5), "reverse"))
    assert pooled.scores_of(begun).tasks == ["copy", "reverse"]
    lines = list(say_for_what(begun, summarise_tasks(begun)))
    assert any("For copy" in line for line in lines)
    assert not any("all tasks" in line for line in lines)


def test_a_cross_is_explained_where_there_is_one():
    def legend(study):
        return [
            text.get_text()
            for text in every_trial(study, ["rope", "t5", "fire"]).legends[0].get_texts()
        ]

    assert legend(whole()) == ["copy", "reverse", "not learned"]
    all_learned = {key: values for key, values in FAR.items() if key not in NOT_LEARNED}
    assert legend(study_of(*trials("copy", "reverse", far=all_learned))) == ["copy", "reverse"]


def test_terminal_and_page_show_it(tmp_path):
    study = whole()
    out = io.StringIO()
    for table in tables.pooled_tables(study):
        Console(file=out, width=160).print(table)
    make_page(study).write(tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    for words in ("All tasks together", "0.400 ± 0.005", "against rope", "left out"):
        assert words in out.getvalue() and words in page
    assert pooled.MEANING in page
