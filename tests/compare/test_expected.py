"""Expected outcomes against the published trials: differences and their intervals."""

import csv

import pytest
import scipy.stats

from posenc.compare.reports.leaderboard import Row
from tests.compare.test_tasks import result
from tests.experiment import experiment

add_rows, expected = experiment("rows").add_rows, experiment("expected")
PAIR = (expected.Side("t5", expected.BEYOND), expected.Side("rope", expected.BEYOND))


def test_the_kept_table_is_that_of_the_published_trials(tmp_path, run):
    run(expected, "--table", tmp_path / "made.csv")
    kept = expected.ROOT / "results/ablations/expected.csv"
    made = (tmp_path / "made.csv").read_text(encoding="utf-8")
    assert made == kept.read_text(encoding="utf-8")
    for row in csv.DictReader(made.splitlines()):
        gaps = list(map(float, row["by_seed"].split()))
        assert len(gaps) == int(row["seeds"]) > 1
        known = scipy.stats.ttest_1samp(gaps, 0).confidence_interval(0.95)
        least = 12.71 * expected.RESOLUTION if row["task"] != expected.TEXT else 0.0
        if max(gaps) - min(gaps) > 2 * least:  # the measurement's resolution has no part in it
            half = (known.high - known.low) / 2  # of numbers rounded to 0.001
            assert float(row["half_95"]) == pytest.approx(half, rel=0.05, abs=0.002)


def test_seeds_are_paired_and_those_that_did_not_learn_have_no_part():
    trials = [
        *(result("t5", seed, (1.0, 0.5 + seed / 10), "copy") for seed in range(3)),
        *(result("rope", seed, (1.0, 0.1), "copy") for seed in (2, 0)),
        result("rope", 1, (0.5, 0.9), "copy"),
        result("t5", 0, (1.0, 0.0), "reverse"),
    ]
    row = dict(zip(expected.HEADER, expected.compared(trials, "copy", PAIR), strict=True))
    assert row["by_seed"] == "+0.400 +0.600" and row["difference"] == "+0.500"
    assert float(row["half_95"]) == pytest.approx(12.706 * 0.1, abs=1e-3)


def test_a_score_that_is_missing_is_refused(tmp_path, run):
    trial = result("t5", 0, (1.0, 0.5), "copy")
    with pytest.raises(ValueError, match="no score at 99"):
        expected.score(trial, 99)
    with pytest.raises(ValueError, match="no seed of copy has both t5, beyond and rope, beyond"):
        expected.compared([trial], "copy", PAIR)
    rows = tmp_path / "rows.jsonl"
    add_rows(rows, [Row(trial.config.hash, "abc", {}, {}, None, trial)])
    code, _, err = run(expected, "--rows", rows, "--table", tmp_path / "made.csv")
    assert code == 2 and "no seed of text has both" in err
    assert not (tmp_path / "made.csv").exists()
