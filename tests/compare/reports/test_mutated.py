"""Sealed studies with numbers and names that no run writes: read, or refused in one line."""

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from posenc.compare.page.numbers import csv_text
from posenc.compare.page.report import report_of, show_report
from posenc.compare.reports.report_runs import _read_study, merge_runs, report_runs
from posenc.compare.results import RateCheck, RateTried, Study, with_labels
from posenc.compare.reuse import reuse_trials
from posenc.compare.run_study import check_out_folder, collect_results
from posenc.compare.trial.result_files import load_results
from posenc.files.sealed_json import HASH_KEY, seal
from posenc.report.report import as_json
from tests.compare.judging.test_summary import study as text_study
from tests.compare.reports.test_reports import on_disk, whole
from tests.compare.test_tasks import result as task_result
from tests.compare.test_tasks import study_of
from tests.experiment import experiment

published_trials = experiment("published_trials")
PublishedTrial, read_rows = published_trials.PublishedTrial, published_trials.read_rows

ODD: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    10**250,
    2**63,
    1e59,
    -1e59,
    1e-300,
    0.5,
    None,
    True,
    "",
    "x",
    "x" * 100_001,
    "a\nb",
    "\x1b[31m",
    "text",
    "rope",
    [],
    {},
    [[]],
    [0] * 2000,
    {"a": 1},
)


TRIED = (RateTried(5e-4, 2.1), RateTried(1e-3, 2.0), RateTried(2e-3, None, "the loss became nan"))


def sealed_study() -> Study:
    """A study of a text and of a task, of two encodings and two seeds, with chosen rates."""
    text = text_study(*(whole(e, seed) for e in ("rope", "alibi") for seed in (0, 1)))
    task = study_of(*(task_result(e, seed) for e in ("rope", "alibi") for seed in (0, 1)))
    rates = tuple(
        RateCheck(task, encoding, TRIED, 1e-3)
        for task in ("text", "copy")
        for encoding in ("rope", "alibi")
    )
    labels = {"alibi": "mine"}
    trials, results = text.trials + task.trials, text.results + task.results
    return dataclasses.replace(
        text, trials=trials, results=results, rates=rates, labels=labels, unchecked={"rope": "odd"}
    )


def places(content: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of each value, of containers too."""
    items = content.items() if isinstance(content, dict) else ()
    items = enumerate(content) if isinstance(content, list) else items
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def mutated(content: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The content with one to three values replaced, dropped, doubled, emptied or moved."""
    content = copy.deepcopy(content)
    for _ in range(draw.choice([1, 1, 2, 3])):
        paths = list(places(content))
        *parents, key = draw.choice(paths)
        held: Any = content
        for each in parents:
            held = held[each]
        how = draw.choice(["odd", "odd", "odd", "drop", "double", "empty", "swap", "other"])
        if how == "drop":
            del held[key]
        elif how == "double" and isinstance(held, list):
            held.insert(key, copy.deepcopy(held[key]))
        elif how == "empty" and isinstance(held[key], list | dict):
            held[key] = type(held[key])()
        elif how == "swap" and isinstance(held, list):
            draw.shuffle(held)
        elif how == "other" and isinstance(held, dict):
            held[draw.choice(["length", "x", "trials", "a\nb", "y" * 100_001])] = held[key]
        else:
            held[key] = draw.choice(ODD)
    return content


def rewritten(path: Path, draw: random.Random) -> None:
    """Replace a sealed file by a mutated one."""
    content = json.loads(path.read_text(encoding="utf-8"))
    del content[HASH_KEY]
    path.write_text(seal(mutated(content, draw)), encoding="utf-8")


def told(study: Study, folder: Path) -> None:
    """Everything that is said of a study, but for drawing the page."""
    study, _ = collect_results(study, folder)
    csv_text(with_labels(study))
    report = report_of(study, folder)
    as_json(report)
    show_report(report, folder, Console(quiet=True))


def one_line(error: ValueError) -> bool:
    return len(str(error).splitlines()) == 1 and len(str(error)) < 2000


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(6))
def test_a_mutated_study_is_told_or_refused_in_one_line(seed, tmp_path, capsys):
    draw, base = random.Random(seed), json.loads(sealed_study().to_json())
    del base[HASH_KEY]
    refused = 0
    for _ in range(60):
        (tmp_path / "study.json").write_text(seal(mutated(base, draw)), encoding="utf-8")
        try:
            told(_read_study(tmp_path), tmp_path)
        except ValueError as error:
            refused += 1
            assert one_line(error), error
        try:  # as a run that goes on from here
            assert len((check_out_folder(tmp_path) or "").splitlines()) < 2
        except ValueError as error:
            assert one_line(error), error
    assert 20 < refused < 60
    assert "Traceback" not in capsys.readouterr().err


def test_mutated_results_count_as_damaged(tmp_path):
    """As a run that is resumed or reused, or a report reads them."""
    draw, base = random.Random(0), sealed_study()
    kept = on_disk(tmp_path / "kept", base)
    files = sorted(kept.glob("*/*.json"))
    (tmp_path / "new").mkdir()
    for _ in range(30):
        before = {file: file.read_bytes() for file in files}
        rewritten(file := draw.choice(files), draw)
        found, damaged = load_results(kept, base.trials)
        assert all(len(line.splitlines()) == 1 for line in damaged)
        told(dataclasses.replace(base, results=tuple(found.values())), kept)
        reuse_trials(tmp_path / "new", base.trials, [kept])
        file.write_bytes(before[file])


def test_mutated_rows_of_a_leaderboard_are_refused_with_their_line(tmp_path):
    draw, results = random.Random(0), sealed_study().results
    path, refused = tmp_path / "rows.jsonl", 0
    rows = [PublishedTrial(r.config.hash, "c0ffee", {}, {}, None, r) for r in results]
    for _ in range(60):
        content = json.loads(draw.choice(rows).to_json())
        del content[HASH_KEY]
        line = json.dumps(json.loads(seal(mutated(content, draw))))
        path.write_text(line + "\n", encoding="utf-8")
        try:
            read_rows(path)
        except ValueError as error:
            refused += 1
            assert one_line(error) and "line 1" in str(error)
    assert refused > 20


def with_trials(study: Study, **fields: Any) -> Study:
    """The study with other fields in the configs of all trials of its text."""

    def other(trial):
        return dataclasses.replace(trial, **fields) if trial.is_on_text else trial

    return dataclasses.replace(
        study,
        trials=tuple(map(other, study.trials)),
        results=tuple(dataclasses.replace(r, config=other(r.config)) for r in study.results),
    )


def of_first(study: Study, **fields: Any) -> Study:
    """The study with other fields in its first result."""
    first, *others = study.results
    return dataclasses.replace(study, results=(dataclasses.replace(first, **fields), *others))


def parts(name: str, study: Study, **fields: Any) -> Study:
    """The study with other fields in the first item of a list of its first result."""
    first, *others = getattr(study.results[0], name)
    return of_first(study, **{name: (dataclasses.replace(first, **fields), *others)})


BASE = sealed_study()
IMPOSSIBLE = {
    "no trials": (dataclasses.replace(BASE, trials=(), results=()), "it has no trials"),
    "length 0": (with_trials(BASE, test_lengths=(0, 256, 512), train_length=0), "from 1 to 2"),
    "length -1": (with_trials(BASE, test_lengths=(128, 256, -1)), "must rise"),
    "a huge length": (with_trials(BASE, test_lengths=(128, 256, 10**250)), "of 251 digits"),
    "many lengths": (with_trials(BASE, test_lengths=tuple(range(128, 1200))), "at most 1,000"),
    "another first": (with_trials(BASE, train_length=64), "begin with train_length"),
    "steps 0": (with_trials(BASE, steps=0), "steps must be from 1"),
    "heads -1": (with_trials(BASE, heads=-1), "heads must be from 1"),
    "rate 0": (with_trials(BASE, lr=0.0), "lr must be positive"),
    "an unknown task": (with_trials(BASE, task="chess"), "chess"),
    "an unknown objective": (with_trials(BASE, objective="guess"), "guess"),
    "start = stop": (parts("by_position", BASE, start=64), "stop must be from 65"),
    "a position twice": (parts("by_position", BASE, stop=65), "positions must rise"),
    "a loss of -1": (parts("by_length", BASE, bits_per_byte=-1.0), "0 to 100 bits"),
    "a huge loss": (parts("by_length", BASE, bits_per_byte=1e59), "0 to 100 bits"),
    "no loss, no reason": (parts("by_length", BASE, bits_per_byte=None), "or the reason"),
    "another length": (parts("by_length", BASE, length=127), "expected scores at 128"),
    "no scores": (of_first(BASE, by_length=()), "expected scores at 128"),
    "a step twice": (of_first(BASE, training=BASE.results[0].training * 2), "must rise"),
    "beyond its steps": (parts("training", BASE, step=101), "must rise"),
    "parameters -1": (of_first(BASE, parameters=-1), "parameters must be from 0"),
    "windows without end": (parts("by_length", BASE, windows=(1.0,) * 100_001), "100,000 items"),
    "a long label": (dataclasses.replace(BASE, labels={"rope": "x" * 100_000}), "100,000 letters"),
    "two lines": (dataclasses.replace(BASE, labels={"rope": "a\nb"}), "a line break"),
    "one label twice": (dataclasses.replace(BASE, labels={"rope": "alibi"}), "twice"),
    "a label of none": (dataclasses.replace(BASE, labels={"t5": "mine"}), "none of its encodings"),
    "a foreign result": (dataclasses.replace(BASE, trials=BASE.trials[1:]), "none of its trials"),
    "a trial twice": (dataclasses.replace(BASE, trials=BASE.trials * 2), "a trial twice"),
    "a result twice": (dataclasses.replace(BASE, results=BASE.results * 2), "a result twice"),
    "two recipes": (
        dataclasses.replace(
            BASE,
            results=(),
            trials=(dataclasses.replace(BASE.trials[0], width=64), *BASE.trials[1:]),
        ),
        "different recipes",
    ),
    "a rate that was not tried": (
        dataclasses.replace(BASE, rates=(dataclasses.replace(BASE.rates[0], chosen=9.0),)),
        "was not tried",
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_no_run_writes_is_refused_before_anything_is_written(name, tmp_path):
    study, why = IMPOSSIBLE[name]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/study.json").write_text(study.to_json(), encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    for folders, out in (["run"], None), (["run"], "out"), (["run", "run"], "out"):
        with pytest.raises(ValueError, match=why) as caught:
            report_runs([tmp_path / folder for folder in folders], out and tmp_path / out)
        assert one_line(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_unmutated_study_is_read_and_told(tmp_path):
    (tmp_path / "study.json").write_text(BASE.to_json(), encoding="utf-8")
    told(_read_study(tmp_path), tmp_path)
    assert merge_runs([(tmp_path, BASE), (tmp_path, BASE)])[1] == []
