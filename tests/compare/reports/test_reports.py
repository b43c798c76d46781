"""Several runs in one report: counted once, told apart, never mixed."""

import dataclasses
import inspect
from pathlib import Path

import pytest

from posenc.compare.judging.answer import conclude
from posenc.compare.page.figures import MAX_ENCODINGS_DRAWN
from posenc.compare.page.report import report_of
from posenc.compare.reports.report_runs import merge_runs, report_runs
from posenc.compare.results import PositionScore, Study, TrialResult
from posenc.compare.trial.config import RECIPE, Architecture
from posenc.report.chart import split_by_series
from posenc.report.html_page import page_of
from posenc.report.report import Plot
from posenc.statistics import seed_intervals
from tests.compare.judging.test_summary import OFFSETS, result, study
from tests.compare.test_tasks import result as of_task
from tests.compare.test_tasks import study_of

pytestmark = pytest.mark.usefixtures("undrawn")

A, B = Path("a"), Path("b")


def whole(encoding, seed, at=2.0):
    """A result with all that a page draws."""
    found = result(encoding, seed, [at + 0.01 * OFFSETS[encoding][seed]] * 3, ((64, 3.0), (128, 2)))
    position = (PositionScore(0, 64, 3.0), PositionScore(64, 128, 2.0))
    return dataclasses.replace(found, by_position=position)


def renamed(given: TrialResult, encoding: str) -> TrialResult:
    """The result as one of another encoding."""
    return dataclasses.replace(given, config=dataclasses.replace(given.config, encoding=encoding))


def changed(given: Study, **fields) -> Study:
    """The study under another config."""
    return dataclasses.replace(
        given,
        trials=tuple(dataclasses.replace(t, **fields) for t in given.trials),
        results=tuple(
            dataclasses.replace(r, config=dataclasses.replace(r.config, **fields))
            for r in given.results
        ),
    )


def on_disk(folder: Path, given: Study) -> Path:
    """A run as posenc compare leaves it."""
    folder.mkdir()
    bare = dataclasses.replace(given, results=())
    (folder / "study.json").write_text(bare.to_json(), encoding="utf-8")
    for each in given.results:
        home = folder / each.config.folder
        home.mkdir()
        (home / "result.json").write_text(each.to_json(), encoding="utf-8")
        if each.timing:
            (home / "timing.json").write_text(each.timing.to_json(), encoding="utf-8")
    return folder


def test_seeds_of_two_machines_are_paired():
    ours = study(whole("rope", 0), whole("t5", 0, 3.0))
    theirs = study(whole("rope", 1), whole("t5", 1, 3.0), whole("alibi", 1))
    theirs = dataclasses.replace(theirs, hardware={"processor": "other"}, started="earlier")
    ours = dataclasses.replace(ours, hardware={"processor": "one"})
    merged, conflicts = merge_runs([(A, ours), (B, theirs)])
    assert conflicts == [] and len(merged.trials) == len(merged.results) == 5
    assert merged.hardware == {"processor": "one; other"} and merged.started == "earlier"
    assert merged.command == "posenc report a b"


def test_a_trial_of_two_runs_counts_once():
    ours = study(whole("rope", 0), whole("t5", 0))
    slower = dataclasses.replace(whole("rope", 0), timing=None)  # other seconds, same numbers
    merged, conflicts = merge_runs([(A, ours), (B, study(slower, whole("rope", 1)))])
    assert [(r.config.encoding, r.config.seed) for r in merged.results] == [
        ("rope", 0),
        ("t5", 0),
        ("rope", 1),
    ]
    assert conflicts == []


def test_other_numbers_of_one_trial_are_named():
    merged, (said,) = merge_runs([(A, study(whole("rope", 0))), (B, study(whole("rope", 0, 2.5)))])
    assert said == (
        "rope seed 0 has other numbers in b than in a (at 512 bytes 2.5 and 2); the latter count"
    )
    assert merged.results[0].by_length[0].bits_per_byte == 2.0


def test_other_numbers_of_one_task_say_which_task():
    runs = [
        (folder, study_of(of_task(exact=(1.0, far)), of_task(task="recall")))
        for folder, far in ((A, 0.5), (B, 0.4))
    ]
    merged, (said,) = merge_runs(runs)
    assert said == "rope on copy seed 0 has other numbers in b than in a; the latter count"
    assert merged.results[0].by_case[1].exact_match == 0.5 and len(merged.results) == 2


def test_what_failed_in_one_run_and_finished_in_the_other_has_finished():
    failed = TrialResult(whole("rope", 0).config, reason="nan")
    for runs in (
        [(A, study(failed)), (B, study(whole("rope", 0)))],
        [(A, study(whole("rope", 0))), (B, study(failed))],
    ):
        merged, conflicts = merge_runs(runs)
        assert not merged.failed and len(merged.finished) == 1 and conflicts == []


def test_what_is_missing_in_one_run_may_be_in_the_other():
    missing = (whole("t5", 0).config,)
    runs = [(A, study(whole("rope", 0), missing=missing)), (B, study(whole("t5", 0)))]
    assert merge_runs(runs)[0].missing == ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"steps": 400}, r"a and b are of different recipes \(steps 100 and 400\)"),
        (
            {"architecture": Architecture(qk_norm=True)},
            r"different recipes \(architecture posenc's own and qk_norm True\)",
        ),
        ({"corpus": "d", "lr": 0.5}, r"\(corpus c and d, lr 0.001 and 0.5\)"),
        ({"recipe": 1}, rf"recipe {RECIPE} and 1"),
        ({"test_lengths": (128, 256, 1024)}, r"test_lengths \(128, 256, 512\) and \(128, 256, 10"),
        ({"torch": "3"}, "torch 2 and 3"),
        ({"task": "copy"}, r"\(task text and copy\)"),
    ],
)
def test_other_recipes_are_refused_by_name(fields, said):
    ours, theirs = study(whole("rope", 0)), changed(study(whole("rope", 1)), **fields)
    with pytest.raises(ValueError, match=said):
        merge_runs([(A, ours), (B, theirs)])


def test_every_field_of_a_trial_is_recipe_but_what_a_study_varies():
    """A field that is added later is part of the recipe until somebody says otherwise."""
    config = whole("rope", 0).config
    for field in dataclasses.fields(config):
        if field.name in ("encoding", "seed", "code", "source"):
            continue
        value = getattr(config, field.name)
        other = (
            value + 1
            if isinstance(value, int | float)
            else (*value, 1)
            if isinstance(value, tuple)
            else f"{value}x"
        )
        with pytest.raises(ValueError, match=rf"different recipes \({field.name} "):
            merge_runs(
                [
                    (A, study(whole("rope", 0))),
                    (B, changed(study(whole("rope", 1)), **{field.name: other})),
                ]
            )


def test_changed_code_and_double_labels_are_refused():
    ours = changed(study(whole("rope", 0)), encoding="my.py:Mine", code="abc")
    theirs = changed(study(whole("rope", 1)), encoding="my.py:Mine", code="def")
    with pytest.raises(ValueError, match=r"my.py:Mine was other code in b \(hash def\) than in a"):
        merge_runs([(A, ours), (B, theirs)])
    one, two = (changed(study(whole("rope", n)), source=s) for n, s in enumerate(("abc", "def")))
    with pytest.raises(ValueError, match=r"rope was other code in b \(hash def\) than in a"):
        merge_runs([(A, one), (B, two)])
    ours = dataclasses.replace(ours, labels={"my.py:Mine": "rope"})
    with pytest.raises(ValueError, match=r"'rope' names two encodings, my\.py:Mine and rope"):
        merge_runs([(A, ours), (B, study(whole("rope", 1)))])


def test_several_runs_are_one_page_and_stay_as_they_were(tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = on_disk(tmp_path / "one", study(*(whole(e, s) for e in ("rope", "t5") for s in (0, 1))))
    two = study(whole("rope", 2, 2.5), whole("t5", 2, 2.5), whole("rope", 1, 2.7))
    two = dataclasses.replace(two, command="posenc compare two")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "study.json").write_text(two.to_json(), encoding="utf-8")  # no folders
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, out, err = call("report", "one", "two", "--out", "both")
    assert code == 0
    assert " are tied: " in out
    assert "rope seed 1 has other numbers in two than in one" in err
    html = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "posenc report one two" in html and "rope" in html
    rows = (tmp_path / "both" / "results.csv").read_text(encoding="utf-8").splitlines()
    assert sum(row.startswith("by_length,128,") for row in rows) == 6
    assert {p: p.read_bytes() for p in before} == before
    found = report_runs([one, tmp_path / "two"])
    assert len(found.results) == 6
    assert len(list((tmp_path / "runs").glob("report-*/report.html"))) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["one", "none"], "none holds no study.json"),
        (["one", "two", "--out", "one"], "one is a run of posenc compare"),
        (["one", "other"], "one and other are of different recipes (steps 100 and 7)"),
        (["one", "two", "--out", "two/study.json"], "is not a folder"),
    ],
)
def test_what_cannot_be_one_report_is_refused(tmp_path, call, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    on_disk(tmp_path / "one", study(whole("rope", 0)))
    on_disk(tmp_path / "two", study(whole("rope", 1)))
    on_disk(tmp_path / "other", changed(study(whole("rope", 1)), steps=7))
    (tmp_path / "none").mkdir()
    code, _, error = call("report", *arguments)
    assert code == 2 and said in error and error.count("\n") == 1


def test_a_run_of_study_json_alone_keeps_its_results(tmp_path, capsys):
    given = study(*(whole(name, seed) for name in ("rope", "t5") for seed in (0, 1, 2)))
    home = tmp_path / "published"
    home.mkdir()
    (home / "study.json").write_text(given.to_json(), encoding="utf-8")
    assert len(report_runs([home]).results) == 6
    back = Study.from_json((home / "study.json").read_text(encoding="utf-8"))
    assert back.results == given.results
    # A trial whose folder is there is what lies in it, here nothing yet.
    (home / given.trials[0].folder).mkdir()
    assert report_runs([home]).results == given.results[1:]


def test_a_figure_has_the_best_encodings_and_the_tables_have_all():
    names = [f"rope:rope_theta={1000 + i}" for i in range(MAX_ENCODINGS_DRAWN + 2)]
    results = [
        renamed(whole("rope", seed, 2.0 + 0.1 * i), name)
        for i, name in enumerate(names)
        for seed in (0, 1)
    ]
    report = report_of(conclude(study(*results)))
    plots = [
        block for section in report.sections for block in section.blocks if isinstance(block, Plot)
    ]
    assert {plot.name for plot in plots} >= {"by-length", "by-position", "training"}
    for plot in plots:
        drawn_names = {name.partition(",")[0] for name in split_by_series(plot.chart.data)}
        assert drawn_names == set(names[:MAX_ENCODINGS_DRAWN])
        assert plot.caption.endswith(" Drawn are the best 24 of 26 encodings.")
    assert len(report.tables()["text"].rows) == len(names)


def test_each_set_of_losses_is_fitted_once_for_a_page(monkeypatch):
    """To fit them again for every sentence and table took most of the time of 400 trials."""
    fitted = []
    fit = seed_intervals._fit_least_squares

    def fit_and_count(values):
        fitted.append(repr(values))
        return fit(values)

    monkeypatch.setattr(seed_intervals, "_fit_least_squares", fit_and_count)
    concluded = conclude(study(*(whole(name, seed) for name in ("rope", "t5") for seed in (0, 1))))
    in_conclusion = len(fitted)
    fitted.clear()
    report_of(concluded)
    page_of(report_of(concluded)).html()
    # Those of near, of far and of three lengths, which are of few trials and may be equal.
    assert in_conclusion <= 6 and 2 <= len(fitted) <= 6


def test_a_study_of_two_thousand_trials_may_be_read():
    """One had more bytes than posenc read of a file, so that it could not go on."""
    most_bytes = inspect.signature(Study.read).parameters["max_bytes"].default
    bytes_of_a_window = len(", 1.8301234567890123")
    # 128 windows at four lengths, and of far bytes with and without context, in three readings.
    windows_of_a_trial = 128 * (4 + 2 * 3 + 3 + 2 * 4)
    assert most_bytes > 3 * 2000 * bytes_of_a_window * windows_of_a_trial
