"""What a named budget is, and the measurement that the default rests on."""

import csv
from pathlib import Path

import pytest

from posenc.compare.budget import BUDGETS, chosen
from posenc.compare.options import Options
from posenc.compare.study import run_study

TABLE = Path(__file__).parents[2] / "results/compare/budget.csv"


def test_a_budget_gives_what_no_option_says():
    assert chosen(Options()) == BUDGETS["standard"]
    assert chosen(Options(budget="quick")).seeds == 1
    assert chosen(Options(budget="quick", seeds=4)) == (4, BUDGETS["quick"].steps)
    assert chosen(Options(budget="thorough", steps=7)) == (BUDGETS["thorough"].seeds, 7)


def test_an_unknown_budget_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="--budget must be quick, standard, thorough, got 'huge'"):
        run_study(Options(budget="huge", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_default_steps_lost_no_pair_that_twice_as_many_separate():
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["lr"] == "0.002"]
    steps = {budget.steps for name, budget in BUDGETS.items() if name != "thorough"}
    for each in steps:
        (pairs,) = {
            (row["pairs_at_twice"], row["pairs_lost"]) for row in rows if row["steps"] == str(each)
        }
        assert int(pairs[0]) >= 12
        assert pairs[1] == "0"
