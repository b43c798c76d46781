"""The round of the leaderboard: what a row lacks, what is taken as done, and what is refused."""

import dataclasses

import pytest
import torch

from posenc.command_line.errors import Stopped
from posenc.compare.plan.equal_tuning import search_trial
from posenc.compare.results import (
    FORMAT,
    Study,
    Timing,
    TrainingPoint,
    TrialResult,
    with_labels,
)
from posenc.compare.scores import CaseScore, FarScore, LengthScore, Reading
from posenc.compare.sources import CorpusInfo
from posenc.compare.trial.config import write_trial
from posenc.compare.trial.result_files import save_result
from posenc.encodings import create
from tests.compare.test_tasks import TEXT
from tests.experiment import experiment

script = experiment("leaderboard")
plan_script = experiment("leaderboard_plan")
published_trials = experiment("published_trials")
INFO = CorpusInfo("a book", "0123456789abcdef", 1, 900, 50, 50, "by contiguous stretches")
PLAN = f"""
[lists]
all = ["rope", "alibi"]

[relative_minutes]
alibi = 2.0

[studies.code]
why = "a text"
corpus = "{INFO.hash}"
minutes = 6
options = {{ tune = true, steps = 2000, batch = 4, width = 16, layers = 2, heads = 2, lr = 0.004 }}

[studies.novel]
why = "another one"
corpus = "fedcba9876543210"
text = "novel.txt"
choices = "code"
minutes = 3
options = {{ steps = 2000, batch = 4, width = 16, layers = 2, heads = 2, lr = 0.004 }}

[studies.recall]
why = "a task"
choices = "code"
one_rate = true
minutes = 3
options = {{ task = ["recall"], width = 16, layers = 2, heads = 2, lr = 0.002 }}

[[rows]]
study = "code"
list = "all"
seeds = 1

[[rows]]
study = "novel"
list = "all"
seeds = 2

[[rows]]
study = "recall"
list = "all"
seeds = 1
"""


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN, encoding="utf-8")
    return path


@pytest.fixture
def plans(plan_file):
    return script.read_round(plan_file)


def finished(trial, valid=2.0, **changes):
    """The result of a trial: on text with all its readings."""
    lengths = tuple(LengthScore(n, 2.0) for n in trial.test_lengths)
    far = tuple(FarScore(n, 2.0, 2.0) for n in trial.test_lengths[1:])
    fields = {"by_length": lengths, "far": far}
    if not trial.is_on_text:
        task = script_task(trial)
        fields = {
            "by_case": tuple(
                CaseScore(case.length, case.variant, 1.0, 1.0, 1.0, 1.0)
                for case in task.cases(trial.test_lengths)
            )
        }
    names = plan_script.readings_of(trial)
    ends = (lengths[0], lengths[-1])
    fields["readings"] = tuple(Reading(name, ends, far[-1:]) for name in sorted(names))
    fields["training"] = (TrainingPoint(1, 2.0, valid),)
    timing = Timing(9.0, 3000.0, 500.0, tuning_seconds=100.0)
    return TrialResult(trial, **fields | {"timing": timing} | changes)


def script_task(trial):
    from posenc.tasks.registry import TASKS

    return TASKS[trial.task]


def rows_of(*results, corpus=INFO):
    trials = tuple(result.config for result in results)
    study = Study(FORMAT, "posenc compare", "", {"torch": "2"}, {}, corpus, trials, results)
    return [published_trials.row_of(result, study, "abc1234") for result in results]


def plan_of(plans, name, encoding):
    study = plans.studies[name]
    return plan_script.plan_of(script.options_of(study, encoding), study)


def searched(plans, encoding, losses):
    """The results of a search that gives the losses of `losses` by (encoding, lr), else 3 bits, to
    its end."""
    search = plan_of(plans, "code", encoding).search
    found = {}
    while True:
        for trial in search.trials:
            loss = losses.get((trial.encoding, trial.lr, trial.encoding_lr), 3.0)
            found.setdefault(trial, finished(trial, loss))
        if not search.widen(found):
            return list(found.values())


SLOPES = {
    ("alibi:learned=true", 0.004, 20.0): 2.0,
    ("alibi", 0.008, 20.0): 2.5,
    ("alibi:learned=true", 0.008, 20.0): 1.9,
    ("alibi:learned=true", 0.008, 80.0): 1.8,
}
"""Losses by which learned slopes win, at twice the rate and with tables 80 times faster."""


def known_of(*results):
    return {dataclasses.replace(r.config, source=""): r for r in results}


def row_of(plans, name, encoding):
    return next(r for r in plans.rows if (r.study.name, r.encoding) == (name, encoding))


def test_the_plan_has_the_recipe_of_the_round():
    plans = script.read_round(script.PLAN_FILE)
    for name, text in (("code", "rope"), ("novel", "rope")):
        (trial,) = plan_of(plans, name, text).task_trials
        sizes = (trial.width, trial.layers, trial.steps, trial.batch, trial.train_length)
        assert sizes == (64, 4, 3000, 16, 128) and trial.test_lengths == (128, 256, 512, 1024)
        assert (trial.test_window, trial.tune_steps) == (128, 150)
    seeds = {(row.study.name, row.list_name): row.seeds for row in plans.rows}
    assert seeds["code", "first"] == seeds["novel", "first"] == 3 and seeds["code", "second"] == 1
    rows = [row.encoding for row in plans.rows if row.study.name == "code"]
    shape = plan_script.encoding_shape(plan_of(plans, "code", "rope").task_trials[0])
    for hybrid in {text for text in rows if text.startswith("rnope")}:
        layers = create(hybrid, shape)
        assert layers.period == 2  # of four layers, two have no positions


def test_a_row_lacks_its_search_then_its_trial_then_nothing(plans):
    known = {"code": {}, "novel": {}, "recall": {}}
    row = row_of(plans, "code", "alibi")
    left = script.left_of(row, plans, known)
    assert (left.search, left.seeds, left.options) == (plan_script.EXPECTED_SEARCH, (0,), None)
    tried = searched(plans, "alibi", SLOPES)
    known["code"] = known_of(*tried[:6])
    assert script.left_of(row, plans, known).search == plan_script.EXPECTED_SEARCH - 6
    known["code"] = known_of(*tried)
    left = script.left_of(row, plans, known)
    assert (left.search, left.seeds) == (0, (0,))
    options = left.options
    assert options.encodings == ["alibi:learned=true"]
    (trial,) = plan_script.plan_of(options, row.study).trials
    known["code"] |= known_of(finished(trial))
    assert script.left_of(row, plans, known)[:2] == (0, ())
    other = dataclasses.replace(trial, lr=trial.lr * 2)
    known["code"] = known_of(*tried, finished(other))
    assert script.left_of(row, plans, known).seeds == (0,)


def test_another_text_and_a_task_take_the_choice_of_the_code(plans):
    known = {"code": {}, "novel": {}, "recall": {}}
    row = row_of(plans, "novel", "alibi")
    assert script.left_of(row, plans, known) == (0, (0, 1), None)
    known["code"] = known_of(*searched(plans, "alibi", SLOPES))
    options = script.left_of(row, plans, known).options
    assert (options.encodings, options.lr) == (["alibi:learned=true"], 0.008)
    assert (options.encoding_lr, options.tune, options.seeds) == (80.0, False, 2)
    options = script.left_of(row_of(plans, "recall", "alibi"), plans, known).options
    assert (options.encodings, options.lr) == (["alibi:learned=true"], 0.002)


def test_a_search_in_which_a_trial_failed_comes_to_its_end(plans):
    tried = searched(plans, "alibi", SLOPES)
    failed = TrialResult(tried[1].config, "loss became nan")
    known = known_of(*tried[:1], failed, *tried[2:])
    choice = plan_script.choice_of("alibi", plans.studies["code"], known)
    assert choice.left == 0 and choice.best.encoding == "alibi:learned=true"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"steps": 250}, "is of another recipe: steps 250 instead of 2000. Move it to a file"),
        ({"corpus": "other"}, f"is of another recipe: corpus other instead of {INFO.hash}"),
        ({"recipe": 6}, "is of another recipe: recipe 6 instead of "),
        ({"precision": "float32"}, "is of another recipe: precision float32 instead of bfloat16"),
    ],
)
def test_rows_of_another_recipe_or_text_are_refused(change, words, plans, tmp_path):
    (trial,) = plan_of(plans, "code", "alibi").task_trials
    file = tmp_path / "code.jsonl"
    published_trials.add_rows(file, rows_of(finished(dataclasses.replace(trial, **change))))
    with pytest.raises(ValueError, match=f"code.jsonl: alibi seed 0 {words}"):
        script.read_study(tmp_path, plans.studies["code"])
    file.rename(tmp_path / "code_rates.jsonl")
    with pytest.raises(ValueError, match="of another recipe: "):
        script.read_study(tmp_path, plans.studies["code"])


@pytest.mark.parametrize(("encoding", "reading"), [("alibi", "window"), ("rope", "tuned")])
def test_a_row_that_lacks_a_reading_is_refused(encoding, reading, plans, tmp_path):
    (trial,) = plan_of(plans, "code", encoding).task_trials
    whole = finished(trial)
    readings = tuple(each for each in whole.readings if each.name != reading)
    rows = rows_of(dataclasses.replace(whole, readings=readings))
    published_trials.add_rows(tmp_path / "code.jsonl", rows)
    with pytest.raises(ValueError, match=f"{encoding} seed 0 lacks the reading {reading}. Remove"):
        script.read_study(tmp_path, plans.studies["code"])
    published_trials.add_rows(tmp_path / "whole" / "code.jsonl", rows_of(whole))
    assert len(script.read_study(tmp_path / "whole", plans.studies["code"])) == 1


def test_a_row_with_a_loss_that_is_no_number_is_refused(plans, tmp_path):
    (trial,) = plan_of(plans, "code", "alibi").task_trials
    bad = dataclasses.replace(finished(trial).by_length[0], bits_per_byte=float("nan"))
    result = finished(trial)
    result = dataclasses.replace(result, by_length=(bad, *result.by_length[1:]))
    with pytest.raises(ValueError, match="not JSON compliant"):
        published_trials.add_rows(tmp_path / "code.jsonl", rows_of(result))
    assert not (tmp_path / "code.jsonl").exists()


@pytest.mark.parametrize(
    "old, new, words",
    [
        ('study = "recall"', 'study = "recal"', "missing or unknown: 'recal'"),
        ('list = "all"', 'list = "al"', "missing or unknown: 'al'"),
        ("minutes = 6", "hours = 6", "missing or unknown: .*hours"),
        (
            'study = "code"\nlist',
            'study = "recall"\nlist',
            "takes the choices of code, and rope has no row there",
        ),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(old, new, words, plan_file):
    plan_file.write_text(PLAN.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError, match=words):
        script.read_round(plan_file)


def where(tmp_path, plan_file):
    return ("--plan", plan_file, "--rows", tmp_path / "rows", "--out", tmp_path / "runs")


def test_what_is_left_is_said_in_hours_and_nothing_is_written(plan_file, tmp_path, run):
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run(script, *where(tmp_path, plan_file))
    lines = out.splitlines()
    assert code == 0 and lines[0] == "code, all, 1 seeds: 0 of 2 trials, 0.8 core-hours left"
    assert lines[1] == "novel, all, 2 seeds: 0 of 4 trials, 0.3 core-hours left"
    assert lines[-1].startswith("all: 0 of 8 trials, about 1.3 core-hours left; 0.0 hours so far")
    assert sorted(tmp_path.rglob("*")) == before
    code, _, err = run(script, *where(tmp_path, plan_file), "--hours", "0")
    assert code == 2 and "--hours must be above 0, got 0." in err


@pytest.fixture
def trained(monkeypatch):
    """In place of training: a list of the options of all runs, each of which leaves the folder of
    its search, or with `trained.stop` of its first trial only and then stops."""

    class Runs(list):
        stop = False

    runs = Runs()

    def run_study(options, show):
        runs.append(options)
        study = next(s for s in plans_now.studies.values() if s.name == options.out.name)
        results = []
        if options.tune:
            (name,) = options.encodings
            results = searched(plans_now, name, SLOPES)
            best = plan_script.choice_of(name, study, known_of(*results)).best
            row = row_of(plans_now, study.name, name)
            options = dataclasses.replace(
                plan_script.chosen_options(row, plans_now, best), out=options.out
            )
        results += [finished(t) for t in plan_script.plan_of(options, study).trials]
        if runs.stop:
            results = results[:1]
        options.out.mkdir(parents=True, exist_ok=True)
        trials = tuple(r.config for r in results[:1])
        made = Study(FORMAT, "posenc compare", "", {}, {}, INFO, trials, ())
        (options.out / "study.json").write_text(made.to_json(), encoding="utf-8")
        for result in results:
            home = options.out / result.config.folder
            home.mkdir(exist_ok=True)
            write_trial(home, result.config)
            save_result(home, result)
        if runs.stop:
            raise Stopped("the same command goes on from here")

    plans_now = None

    def use(plans):
        nonlocal plans_now
        plans_now = plans
        monkeypatch.setattr(script, "run_study", run_study)
        monkeypatch.setattr(script, "commit", lambda: "abc1234")
        monkeypatch.setattr(script, "with_text", lambda plan, folder: plan)
        return runs

    return use


def test_a_stopped_row_keeps_what_is_done_and_the_next_call_goes_on(
    plan_file, plans, tmp_path, run, trained
):
    runs = trained(plans)
    runs.stop = True
    code, _, err = run(script, *where(tmp_path, plan_file), "--hours", 9)
    assert code == 130 and err.splitlines()[-1].startswith("leaderboard.py: stopped; ")
    rates = tmp_path / "rows" / "code_rates.jsonl"
    assert len(published_trials.read_rows(rates)) == 1
    runs.stop = False
    code, out, _ = run(script, *where(tmp_path, plan_file), "--hours", 9)
    texts = [options.encodings[0] for options in runs]
    assert code == 0 and texts == ["rope", "rope", "alibi", "rope", "alibi:learned=true"]
    assert "novel, alibi: not run; --texts is needed" in out
    assert "all: 4 of 8 trials" in out.splitlines()[-1]
    assert len(published_trials.read_rows(tmp_path / "rows" / "recall.jsonl")) == 2
    code, out, _ = run(script, *where(tmp_path, plan_file), "--hours", 9)
    assert code == 0 and len(runs) == 5


def test_a_row_that_would_not_end_in_time_does_not_begin(plan_file, plans, tmp_path, run, trained):
    runs = trained(plans)
    code, out, _ = run(script, *where(tmp_path, plan_file), "--hours", 0.1)
    assert code == 0 and len(runs) == 0
    assert "code, rope: not run; it would not end in time" in out


def test_results_of_other_recipes_in_the_folder_are_left_there(plans, tmp_path):
    study = plans.studies["code"]
    (trial,) = plan_of(plans, "code", "alibi").task_trials
    others = [dataclasses.replace(trial, steps=9), dataclasses.replace(TEXT, test_lengths=(16,))]
    folder = tmp_path / "code"
    folder.mkdir()
    for config in (trial, search_trial(trial), *others):
        home = folder / config.folder
        home.mkdir()
        write_trial(home, config)
        save_result(home, finished(config))
    made = Study(FORMAT, "posenc compare", "", {}, {}, INFO, (trial,), ())
    (folder / "study.json").write_text(made.to_json(), encoding="utf-8")
    assert script.keep(folder, study, tmp_path / "rows", "x") == 2
    for name in ("code", "code_rates"):
        assert len(published_trials.read_rows(tmp_path / "rows" / f"{name}.jsonl")) == 1


def test_an_encoding_of_a_file_is_refused(plans, tmp_path, monkeypatch):
    script.check_own(plan_of(plans, "code", "alibi"))
    (tmp_path / "own.py").write_text("from posenc import RoPE\nclass Mine(RoPE): pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the leaderboard has posenc's own encodings only"):
        script.check_own(plan_of(plans, "code", "own.py:Mine"))


def test_rows_of_other_code_are_refused_before_any_row_runs(
    plan_file, plans, tmp_path, run, trained
):
    runs = trained(plans)
    (trial,) = plan_of(plans, "code", "alibi").trials
    changed = dataclasses.replace(trial, source="abc")
    file = tmp_path / "rows" / "code.jsonl"
    published_trials.add_rows(file, rows_of(finished(changed)))
    code, _, err = run(script, *where(tmp_path, plan_file), "--hours", 9)
    assert (
        code == 2
        and "code: its alibi seed 0 is of other code, that of commit abc1234. Go on with" in err
    )
    assert not runs and not (tmp_path / "runs").exists()
    assert run(script, *where(tmp_path, plan_file))[0] == 0  # what is left is told at any code


def test_rows_are_not_trained_again_on_another_machine(plans, tmp_path):
    trial = plan_of(plans, "code", "alibi").trials[0]
    failed = TrialResult(dataclasses.replace(trial, seed=1), "loss became nan")
    script.lay_out(rows_of(finished(trial), failed), tmp_path)
    assert script.is_done(tmp_path, trial) and not script.is_done(tmp_path, failed.config)


def test_another_text_is_refused_before_anything_is_trained(plans, tmp_path, run, plan_file, text):
    (tmp_path / "texts").mkdir()
    text.rename(tmp_path / "texts" / "novel.txt")
    row = row_of(plans, "novel", "alibi")
    known = {"code": known_of(*searched(plans, "alibi", SLOPES)), "novel": {}}
    given = script.argparse.Namespace(
        texts=tmp_path / "texts", rows=tmp_path / "rows", out=tmp_path / "runs", workers=1
    )
    options = script.options_to_run(row, script.left_of(row, plans, known), given)
    with pytest.raises(ValueError, match=r"novel: its text has the hash fedc.*novel.txt has "):
        script.run_row(row, options, given)
    assert not (tmp_path / "runs").exists()


def test_code_without_a_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(script.posenc, "__file__", str(tmp_path / "posenc/__init__.py"))
    with pytest.raises(ValueError, match=r"git knows no commit of .*run this in a clone\."):
        script.commit()


def test_results_of_another_machine_lie_in_the_folder_before_a_row_runs(
    plan_file, plans, tmp_path, run, trained, monkeypatch
):
    trained(plans)
    tried = searched(plans, "rope", {})
    published_trials.add_rows(tmp_path / "rows" / "code_rates.jsonl", rows_of(*tried))
    found = []

    def stopped(options, show):
        found.extend(options.out.glob("*/result.json"))
        raise Stopped("the same command goes on from here")

    monkeypatch.setattr(script, "run_study", stopped)
    assert run(script, *where(tmp_path, plan_file), "--hours", 9)[0] == 130
    assert len(found) == len(tried)


def test_a_seed_of_two_rows_counts_once(plan_file, tmp_path, run):
    more = PLAN + '\n[[rows]]\nstudy = "code"\nlist = "all"\nseeds = 3\n'
    plan_file.write_text(more, encoding="utf-8")
    _, out, _ = run(script, *where(tmp_path, plan_file))
    assert "code, all, 3 seeds: 0 of 4 trials, 0.6 core-hours left" in out
    assert "all: 0 of 12 trials, about 1.9 core-hours left" in out


def test_the_rows_so_far_are_of_the_plan():
    plans = script.read_round(script.PLAN_FILE)
    first = published_trials.read_rows(script.ROWS_FOLDER / "code.jsonl")[0].result.config
    if first.torch != torch.__version__:
        pytest.skip(f"the rows are of torch {first.torch}")
    rows = {s.name: script.read_study(script.ROWS_FOLDER, s) for s in plans.studies.values()}
    assert rows["code"]
    known = {name: script.results_of(of_study) for name, of_study in rows.items()}
    rope = row_of(plans, "code", "rope")
    assert script.left_of(rope, plans, known)[:2] == (0, ())


def write_round(plans, folder, seeds=1):
    """Write rows of the code, of the seeds of the novel that are below `seeds`, and of the task."""
    rows = {name: [] for name in ("code", "code_rates", "novel", "recall")}
    for encoding in ("rope", "alibi"):
        tried = searched(plans, encoding, SLOPES)
        known = {"code": known_of(*tried), "novel": {}, "recall": {}}
        rows["code_rates"] += rows_of(*tried)
        for name in ("code", "novel", "recall"):
            row = row_of(plans, name, encoding)
            options = script.left_of(row, plans, known).options
            trials = plan_script.plan_of(options, row.study).trials
            found = [finished(trial) for trial in trials if trial.seed < seeds]
            info = dataclasses.replace(INFO, hash=row.study.corpus)
            rows[name] += rows_of(*found, corpus=info if row.study.corpus else None)
    for name, found in rows.items():
        published_trials.add_rows(folder / f"{name}.jsonl", found)


def test_a_study_is_on_the_board_with_as_many_seeds_as_all_its_encodings_have(
    plans, plan_file, tmp_path
):
    write_round(plans, tmp_path / "few")
    found = plan_script.published_studies(tmp_path / "few", plan_file)
    assert [*found] == ["code", "novel", "tasks"] and len(found["novel"].results) == 2
    lacking = published_trials.read_rows(tmp_path / "few/novel.jsonl")[:1]
    (tmp_path / "few/novel.jsonl").unlink()
    published_trials.add_rows(tmp_path / "few/novel.jsonl", lacking)
    assert "novel" not in plan_script.published_studies(tmp_path / "few", plan_file)
    write_round(plans, tmp_path / "all", seeds=2)
    found = plan_script.published_studies(tmp_path / "all", plan_file)
    assert {name: len(study.results) for name, study in found.items()} == {
        "code": 2,
        "novel": 4,
        "tasks": 2,
    }
    assert found["code"].labels == {"alibi:learned=true": "alibi (learned slopes)"}
    assert [check.encoding for check in found["code"].rates] == ["rope", "alibi (learned slopes)"]
    assert {check.best.bits for check in found["code"].rates} == {3.0, 1.8}
    assert {each.bits for check in found["novel"].rates for each in check.tried} == {None}
    assert [check.encoding for check in found["tasks"].rates] == ["rope", "alibi (learned slopes)"]
    assert {trial.lr for trial in found["tasks"].trials} == {0.002}


def test_an_encoding_with_one_seed_makes_a_study_beside_the_others(plans, plan_file, tmp_path):
    more = PLAN.replace("[lists]", '[lists]\ntwo = ["rope"]') + (
        '[[rows]]\nstudy = "code"\nlist = "two"\nseeds = 2\n'
    )
    plan_file.write_text(more, encoding="utf-8")
    with_two = script.read_round(plan_file)
    write_round(with_two, tmp_path / "rows")
    found = plan_script.published_studies(tmp_path / "rows", plan_file)
    assert found["code"].encodings == ("rope",) and len(found["code"].results) == 1
    row = next(row for row in with_two.rows if row.seeds == 2 and row.study.name == "code")
    known = {"code": known_of(*searched(with_two, "rope", SLOPES))}
    options = script.left_of(row, with_two, known).options
    trials = plan_script.plan_of(options, row.study).trials
    published_trials.add_rows(tmp_path / "rows/code.jsonl", rows_of(finished(trials[1])))
    found = plan_script.published_studies(tmp_path / "rows", plan_file)
    assert found["code"].encodings == ("rope",) and len(found["code"].results) == 2
    assert found["code-one-seed"].encodings == ("rope", "alibi:learned=true")
    assert {trial.seed for trial in found["code-one-seed"].trials} == {0}


def test_a_file_that_the_plan_does_not_name_is_a_study_by_itself(plans, plan_file, tmp_path):
    write_round(plans, tmp_path)
    grids = plan_script.read_rows(tmp_path / "recall.jsonl")[1:]  # at one rate
    published_trials.add_rows(tmp_path / "grids.jsonl", grids)
    found = plan_script.published_studies(tmp_path, plan_file)
    assert [*found] == ["code", "novel", "tasks", "grids"]
    (tmp_path / "grids.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"grids.jsonl has no row"):
        plan_script.published_studies(tmp_path, plan_file)


def test_seconds_of_steps_that_were_taken_in_turns_join_the_code(
    plans, plan_file, tmp_path, monkeypatch
):
    write_round(plans, tmp_path)
    monkeypatch.setattr(script, "NUM_TURNS", 2)
    study = plans.studies["code"]
    known = {"code": plan_script.results_of(plan_script.read_study(tmp_path, study))}
    script.time_steps(plans, known, tmp_path)
    found = plan_script.published_studies(tmp_path, plan_file)
    assert found["code"].step_seconds.keys() == {"rope", "alibi:learned=true"}
    assert {len(seconds) for seconds in found["code"].step_seconds.values()} == {2}
    assert not found["tasks"].step_seconds
    path = tmp_path / plan_script.STEP_SECONDS_FILE
    path.write_text(path.read_text(encoding="utf-8").replace("rope", "rop"), encoding="utf-8")
    with pytest.raises(ValueError, match="its hash differs"):
        plan_script.published_studies(tmp_path, plan_file)


def test_tasks_are_one_study_when_all_are_there(plans, plan_file, tmp_path):
    write_round(plans, tmp_path)
    copy = PLAN[PLAN.index("[studies.recall]") : PLAN.index("[[rows]]")].replace("recall", "copy")
    row = '[[rows]]\nstudy = "copy"\nlist = "all"\nseeds = 1\n'
    plan_file.write_text(PLAN.replace("[[rows]]", f"{copy}[[rows]]", 1) + row, encoding="utf-8")
    assert [*plan_script.published_studies(tmp_path, plan_file)] == ["code", "novel"]
    with_copy = script.read_round(plan_file)
    known = {"code": {}, "copy": {}}
    for row in (row_of(with_copy, "copy", encoding) for encoding in ("rope", "alibi")):
        known["code"] |= known_of(*searched(with_copy, row.encoding, SLOPES))
        options = script.left_of(row, with_copy, known).options
        trials = plan_script.plan_of(options, row.study).trials
        rows = rows_of(*map(finished, trials), corpus=None)
        published_trials.add_rows(tmp_path / "copy.jsonl", rows)
    tasks = plan_script.published_studies(tmp_path, plan_file)["tasks"]
    assert (tasks.sequence_tasks, len(tasks.results)) == (("recall", "copy"), 4)
    assert with_labels(tasks).encodings == ("rope", "alibi (learned slopes)")
