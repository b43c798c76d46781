"""What a named budget is."""

from dataclasses import replace

import pytest

from posenc.compare.defaults import BUDGETS
from posenc.compare.options import Options
from posenc.compare.plan.encodings import read_encodings
from posenc.compare.plan.plan import (
    chosen_budget,
    make_plan,
    plan_one_trial_per_task,
    with_suite_defaults,
)
from posenc.compare.run_study import run_study
from posenc.tasks.registry import TASKS
from tests.texts import prose


def test_a_budget_sets_seeds_and_steps_unless_options_do():
    assert chosen_budget(Options()) == BUDGETS["standard"]
    assert chosen_budget(Options(budget="quick")).seeds == 1
    assert chosen_budget(Options(budget="quick", seeds=4))[:2] == (4, BUDGETS["quick"].steps)
    assert chosen_budget(Options(budget="thorough", steps=7))[:2] == (BUDGETS["thorough"].seeds, 7)


@pytest.mark.parametrize(
    ("encodings", "options", "seeds"),
    [
        (("rope", "alibi"), {}, 4),
        (("rope",), {}, 2),
        (("rope", "alibi", "t5"), {}, 2),
        (("rope", "alibi"), {"seeds": 3}, 3),
        (("rope", "alibi"), {"budget": "quick"}, 1),
        (("rope", "alibi"), {"suite": True}, 2),
    ],
)
def test_two_encodings_get_four_seeds_unless_other_numbers_are_asked_for(encodings, options, seeds):
    assert make_plan(Options(list(encodings), **options)).num_seeds == seeds


def test_an_unknown_budget_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(
        ValueError, match="--budget must be quick, standard or thorough, got 'huge'"
    ):
        run_study(Options(budget="huge", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_suite_is_its_tasks_sizes_and_seeds():
    quick = with_suite_defaults(Options(suite=True, budget="quick"))
    assert quick.task == ["text", "copy", "recall", "offset"]
    assert (quick.width, quick.layers, quick.heads) == (64, 3, 4) and not quick.search_lr
    assert chosen_budget(quick)[:2] == (1, 600)
    thorough = with_suite_defaults(Options(suite=True, budget="thorough", width=32))
    chosen_one_by_one = {"needle_by_meaning", "variables", "common_words"}
    chosen_one_by_one |= {name for name in TASKS if name.startswith("grid")}
    assert set(thorough.task or ()) == {"text", *TASKS} - chosen_one_by_one
    assert thorough.search_lr and thorough.width == 32 and chosen_budget(thorough).seeds == 3
    assert with_suite_defaults(Options(task=["copy"])) == Options(task=["copy"])


def test_a_larger_budget_of_the_suite_goes_on_with_the_trials_of_a_smaller_one():
    def trials(budget):
        options = with_suite_defaults(Options(suite=True, budget=budget))
        planned = plan_one_trial_per_task(options, read_encodings(["rope"]))
        return {
            replace(t, seed=seed) for t in planned for seed in range(chosen_budget(options).seeds)
        }

    assert trials("quick") < trials("standard") < trials("thorough")


def test_a_suite_takes_no_other_tasks():
    with pytest.raises(ValueError, match=r"--task: --suite has its own tasks \(text, copy"):
        with_suite_defaults(Options(suite=True, task=["reverse"]))
    with pytest.raises(
        ValueError, match="--budget must be quick, standard or thorough, got 'huge'"
    ):
        make_plan(Options(suite=True, budget="huge"))


@pytest.mark.slow
def test_the_suite_runs_as_one_command(tmp_path, capsys, undrawn):
    text = tmp_path / "text.txt"
    text.write_bytes(prose(19_200))
    study = run_study(
        Options(
            ["rope"],
            suite=True,
            budget="quick",
            steps=1,
            tune_steps=1,
            batch=2,
            width=16,
            layers=1,
            heads=1,
            text=[str(text)],
            workers=1,
            precision="float32",
            device="cpu",
            out=tmp_path / "out",
        )
    )
    assert [r.config.task for r in study.finished] == ["text", "copy", "recall", "offset"]
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot say: One seed, one text, three tasks" in out
    assert "No trial has learned copy, so nothing is said of it: give more --steps." in out
