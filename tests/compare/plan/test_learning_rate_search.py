"""Learning rates are chosen in distribution: the choice cannot see an unseen length."""

import dataclasses
import html
import json

import pytest

from posenc.compare.judging.summary import summarise_tasks
from posenc.compare.options import Options
from posenc.compare.page.report import report_of
from posenc.compare.plan.learning_rate_search import choose_rates, rate_trials, with_chosen_rates
from posenc.compare.reports.report_runs import merge_runs
from posenc.compare.results import Study, TrainingPoint, TrialResult
from posenc.compare.run_study import run_study
from posenc.compare.trial.task_of_trial import task_of
from posenc.report.html_page import page_of
from posenc.tasks.registry import TASKS
from tests.compare.test_tasks import COPY, TEXT, planned, result, study_of

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = {
    "width": 16,
    "layers": 1,
    "heads": 1,
    "seeds": 1,
    "steps": 20,
    "batch": 2,
    "workers": 1,
    "train_length": 4,
    "test_lengths": "4,8",
    "precision": "float32",
    "device": "cpu",
}


def tried(trial, bits, **changes):
    """What a trial of `rate_trials` gave, with this loss on validation data."""
    points = () if bits is None else (TrainingPoint(trial.steps, 1.0, bits),)
    return TrialResult(trial, training=points, **changes)


def checked(losses, trial=COPY):
    return [tried(t, bits) for t, bits in zip(rate_trials([trial]), losses, strict=True)]


@pytest.mark.parametrize(
    "task", ["text", *(n for n, task in TASKS.items() if not task.why_retired)]
)
def test_trials_that_choose_a_rate_measure_nothing_beyond_the_training_length(task):
    looks_both_ways = task in TASKS and TASKS[task].looks_both_ways
    (trial,) = planned("axial_rope" if looks_both_ways else "nope", task=[task])
    for each in rate_trials([trial]):
        assert each.test_lengths == (trial.train_length,)
        made = task_of(each)
        if made is not None:
            (case,) = made.cases(each.test_lengths)
            assert (case.length, case.variant) == (trial.train_length, "")
            assert made.max_tokens(case) == made.max_tokens(made.cases(trial.test_lengths)[0])


def test_a_trial_that_was_tested_beyond_has_no_say():
    near = checked((1.0, 0.5, 2.0))
    far = [
        dataclasses.replace(r, config=dataclasses.replace(r.config, test_lengths=(4, 8)))
        for r in near
    ]
    assert choose_rates(near)[0].chosen == COPY.lr
    with pytest.raises(ValueError, match=r"at the training length 4 only, .* tested at 4, 8"):
        choose_rates([*near[:2], far[2]])


def test_each_encoding_and_task_has_its_own_three_rates_of_one_seed():
    trials = [
        dataclasses.replace(trial, encoding=name, seed=seed)
        for trial in (TEXT, COPY)
        for seed in (0, 1)
        for name in ("rope", "t5")
    ]
    rates = rate_trials(trials)
    assert len(rates) == len(set(rates)) == 12 and {trial.seed for trial in rates} == {0}
    assert [trial.lr for trial in rates[:3]] == [TEXT.lr / 2, TEXT.lr, TEXT.lr * 2]
    assert {trial.steps for trial in rates} == {TEXT.steps // 5}
    assert rate_trials([dataclasses.replace(TEXT, steps=4)])[0].steps == 1
    assert len({trial.folder for trial in rates}) == 12


@pytest.mark.parametrize(
    "losses, factor",
    [
        ((1.0, 0.5, 2.0), 1),
        ((0.4, 0.5, 2.0), 0.5),
        ((float("nan"), 0.5, 0.3), 2),
        ((0.9, 0.5, float("nan")), 1),
        ((None, 0.5, 0.7), 1),
        ((None, None, None), None),
        ((float("inf"), float("nan"), None), None),
    ],
)
def test_the_lowest_finite_loss_decides(losses, factor):
    (check,) = choose_rates(checked(losses))
    assert check.chosen == (None if factor is None else COPY.lr * factor)
    study = with_chosen_rates(study_of(result()), checked(losses))
    assert study.trials[0].lr == COPY.lr * (factor or 1)


def test_a_trial_that_failed_is_not_chosen_and_says_so():
    low, usual, high = rate_trials([COPY])
    found = [tried(low, 0.9), tried(usual, 0.5), tried(high, 0.1, reason="the loss became nan")]
    study = with_chosen_rates(study_of(result()), found)
    assert study.rates[0].chosen == COPY.lr
    (row,) = report_of(study).tables()["learning-rates"].rows
    assert "0.002: failed" in row and "0.0005: 0.900" in row


def test_a_rate_at_the_edge_is_called_so_on_the_page(tmp_path):
    study = with_chosen_rates(study_of(result(), result("t5")), checked((0.1, 0.2, 0.3)))
    ran = zip(study.results, study.trials, strict=True)
    results = tuple(dataclasses.replace(each, config=trial) for each, trial in ran)
    study = dataclasses.replace(study, results=results)
    study = dataclasses.replace(study, tasks=summarise_tasks(study))
    assert Study.from_json(study.to_json()) == study
    page_of(report_of(study)).write(tmp_path / "report.html")
    page = html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))
    for words in ("Learning rates", "0.0005, the lowest tried", "from 0.0005 to 0.001"):
        assert words in page


def test_a_study_of_before_has_no_rates():
    fields = json.loads(study_of(result()).to_json())
    assert fields["rates"] == []
    assert "learning-rates" not in report_of(study_of(result())).tables()


def test_runs_whose_rates_differ_are_not_mixed(tmp_path):
    low = with_chosen_rates(study_of(result()), checked((0.1, 0.2, 0.3)))
    high = with_chosen_rates(study_of(result()), checked((0.3, 0.2, 0.1)))
    t5 = dataclasses.replace(COPY, encoding="t5")
    other = with_chosen_rates(study_of(result("t5")), checked((0.3, 0.2, 0.1), t5))
    with pytest.raises(ValueError, match=r"rope on copy was checked to a learning rate of 0.0005"):
        merge_runs([(tmp_path / "a", low), (tmp_path / "b", high)])
    with pytest.raises(ValueError, match=r"lr checked for each encoding and 0.001"):
        merge_runs([(tmp_path / "a", low), (tmp_path / "b", study_of(result("t5")))])
    both, _ = merge_runs([(tmp_path / "a", low), (tmp_path / "b", other)])
    assert [(t.encoding, t.lr) for t in both.trials] == [("rope", 0.0005), ("t5", 0.002)]
    assert [check.encoding for check in both.rates] == ["rope", "t5"]


def test_the_command_trains_at_the_rate_that_won_and_resumes(tmp_path, capsys):
    options = Options(["mine=rope"], task=["copy"], search_lr=True, out=tmp_path / "out", **SMALL)
    study = run_study(options)
    (check,) = study.rates
    best = min(check.tried, key=lambda t: t.bits or 9)
    assert check.chosen == best.lr and study.trials[0].lr == best.lr and len(study.finished) == 1
    assert study.finished[0].config == study.trials[0]
    assert "mine" in capsys.readouterr().out
    results = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/result.json")}
    assert len(results) == 4
    again = run_study(options)
    assert {p: p.stat().st_mtime_ns for p in results} == results
    assert (again.rates, again.results) == (study.rates, study.results)
