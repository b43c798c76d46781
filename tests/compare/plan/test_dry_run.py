"""A dry run says what would run, measures it, and leaves nothing."""

import dataclasses
import re
from pathlib import Path

import pytest

from posenc import compare
from posenc.compare.plan import cost as module
from posenc.compare.plan.cost import dry_run, most_training_tokens
from posenc.compare.plan.learning_rate_search import rate_trials
from posenc.compare.plan.time_estimate import MeasuredKind
from tests.compare.judging.test_summary import TRIAL
from tests.texts import prose


def kinds_of(seconds):
    """What was measured of each kind of trials, of which one takes these seconds."""
    return {kind: MeasuredKind((1.0,), each) for kind, each in seconds.items()}


SMALL = {"width": 16, "layers": 1, "heads": 1}


def test_the_sentence_counts_trials_tokens_and_time(monkeypatch):
    seconds = {"rope": 60.0, "t5": 120.0}
    monkeypatch.setattr(module, "measure_kinds", lambda *arguments: kinds_of(seconds))
    trials = [
        dataclasses.replace(TRIAL, encoding=name, seed=seed, steps=100, batch=4, train_length=8)
        for seed in range(3)
        for name in seconds
    ]
    assert most_training_tokens(trials[0]) == 3200
    report = dry_run(trials, None, 2, 2)
    assert report.headline.startswith("6 trials, 19,200 tokens, about 4:30 on 2 workers")
    assert report.tables()["trials"].rows == [
        ["rope", 3, 100, 9600, "1:00"],
        ["t5", 3, 100, 9600, "2:00"],
    ]
    assert report.facts["seconds"] == 270
    assert "about 2:00 on 600 workers" in dry_run(trials, None, 600, 1).headline


def test_trials_that_choose_a_rate_have_a_row_of_their_own(monkeypatch):
    seconds = {"rope": 60.0, "rope, 20 steps": 12.0}
    monkeypatch.setattr(module, "measure_kinds", lambda *arguments: kinds_of(seconds))
    trials = (*rate_trials([TRIAL]), TRIAL)
    report = dry_run(trials, None, 1, 1)
    assert report.headline.startswith("4 trials, 40,960 tokens, about 1:36 on 1 worker")
    rows = [row[:3] for row in report.tables()["trials"].rows]
    assert rows == [["rope, 20 steps", 3, 20], ["rope", 1, 100]]


def test_what_cannot_be_measured_is_not_estimated(monkeypatch):
    monkeypatch.setattr(module, "measure_kinds", lambda *arguments: kinds_of({"t5": 60.0}))
    both = [dataclasses.replace(TRIAL, encoding=name) for name in ("rope", "t5")]
    report = dry_run(both, None, 1, 1)
    assert "their steps cannot be measured here" in report.headline
    assert "on 1 worker" not in report.headline and report.facts["seconds"] is None
    assert [row[-1] for row in report.tables()["trials"].rows] == ["not measured", "1:00"]


def test_the_device_is_named(monkeypatch):
    monkeypatch.setattr(module, "measure_kinds", lambda *arguments: kinds_of({"rope": 60.0}))
    trial = dataclasses.replace(TRIAL, encoding="rope", device="cuda")
    assert "about 1:00 on 1 worker on cuda, from steps" in dry_run([trial], None, 1, 1).headline


@pytest.mark.slow
def test_nothing_is_trained_and_nothing_left(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text.txt"
    text.write_bytes(prose(9600))
    from posenc.compare.options import Options
    from posenc.compare.run_study import run_study

    asked = Options(
        ["rope"],
        [str(text)],
        train_length=16,
        test_lengths="32",
        steps=1000,
        batch=2,
        seeds=2,
        out=Path("out"),
        dry_run=True,
        workers=1,
        precision="float32",
        **SMALL,
    )
    study = run_study(asked)
    said = capsys.readouterr().out
    assert (len(study.trials), study.results) == (2, ())
    tokens = 2 * 1000 * 2 * 16
    assert f"2 trials, {tokens:,} tokens, about " in said and "from steps measured now" in said
    minutes, seconds = map(int, re.findall(r"about (\d+):(\d\d) on", said)[0])
    assert 6 <= 60 * minutes + seconds < 3000, "two trials start in three seconds each"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    quiet = compare.run(
        ["rope"],
        text=text,
        train_length=16,
        test_lengths=[32],
        steps=3,
        batch=2,
        seeds=1,
        dry_run=True,
        workers=1,
        precision="float32",
        **SMALL,
    )
    assert quiet.results == () and capsys.readouterr().out == ""
