"""Published tables of tasks against our trials, scored in several ways."""

import csv

from posenc.compare.judge import published
from posenc.compare.reports import leaderboard
from posenc.compare.reports.leaderboard import Row
from tests.compare.test_tasks import result
from tests.experiment import experiment

add_rows, scoring = experiment("rows").add_rows, experiment("published_scoring")


def made(tmp_path, results):
    rows = [Row(each.config.hash, "abc", {}, {}, None, each) for each in results]
    add_rows(tmp_path / "rows.jsonl", rows)
    return tmp_path / "rows.jsonl"


def test_the_kept_table_is_that_of_the_published_trials(tmp_path, run):
    run(scoring, "--table", tmp_path / "made.csv")
    kept = scoring.ROOT / "results/ablations/published_scoring.csv"
    assert (tmp_path / "made.csv").read_text(encoding="utf-8") == kept.read_text(encoding="utf-8")


def test_exact_match_over_all_lengths_is_the_agreement_of_the_leaderboard():
    found = scoring.rows_of([row.result for row in leaderboard.published()])
    whole = {}
    for table, task, measure, lengths, agreeing, pairs, *_ in found:
        if measure == "exact_match":
            whole[table, task] = len(lengths), agreeing, pairs  # the last has most lengths
    ours = published.agreements(leaderboard.study_of(leaderboard.published()))
    assert sorted(each[1:] for each in whole.values()) == sorted(
        (each.agreeing, each.pairs) for each in ours if each.multiple is None
    )


def test_the_order_is_that_of_the_score_and_what_did_not_learn_is_left_out():
    trials = [
        result("nope", 0, (1.0, 0.2), "reverse"), result("t5", 0, (1.0, 0.9), "reverse"),
        result("rope", 0, (1.0, 0.4), "reverse"), result("alibi", 0, (0.5, 0.9), "reverse"),
    ]  # fmt: skip
    assert scoring.scores(trials, "exact_match", [8]) == {
        "nope": -0.2, "t5": -0.9, "rope": -0.4, "alibi": -0.9,
    }  # fmt: skip
    trials = [each for each in trials if each.config.encoding != "alibi"]
    cases = [each.by_case for each in trials]
    three = [
        type(each)(each.config, each.parameters, by_case=(*case, case[-1]))
        for each, case in zip(trials, cases, strict=True)
    ]
    first = next(iter(scoring.rows_of([*three, result("alibi", 0, (0.5, 0.9), "reverse")])))
    assert first[0].startswith("Kazemnejad, reverse") and first[6] == "nope t5 rope"
    assert first[4:6] == (1, 2)  # of t5 and nope above rope: nope is not


def test_rows_without_such_a_trial_are_refused(tmp_path, run):
    rows = made(tmp_path, [result("rope", task="offset")])
    code, _, err = run(scoring, "--rows", rows, "--table", tmp_path / "made.csv")
    assert code == 2 and "has no trials of a task" in err
    assert not (tmp_path / "made.csv").exists()


def test_the_table_has_a_row_for_each_way(tmp_path, run):
    run(scoring, "--table", tmp_path / "made.csv")
    with (tmp_path / "made.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    ways = {(row["measure"], row["lengths"]) for row in found if row["task"] == "reverse"}
    assert len(ways) == 4 * 3
    assert {row["pairs"] for row in found if "mc2x" in row["table"]} == {"9"}
