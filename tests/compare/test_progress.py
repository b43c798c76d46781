"""Events and TensorBoard of a comparison."""

import dataclasses
import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from rich.console import Console

from posenc.compare import progress
from posenc.compare.engines.run_trials import run_trials
from posenc.compare.progress import EventFile, TensorBoard, open_watchers
from posenc.compare.results import Study, TrainingPoint, TrialResult
from tests.compare.judging.test_summary import TRIAL

pytestmark = pytest.mark.usefixtures("undrawn")

DONE = TrialResult(TRIAL, training=(TrainingPoint(5, 3.5, 3.25), TrainingPoint(10, 2.5, 2.75)))


def told(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_events_are_lines_of_json_in_the_order_in_which_they_happen(tmp_path, monkeypatch):
    clock = iter([10.0, 10.5, 11.25])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    path = tmp_path / "events.jsonl"
    other = dataclasses.replace(TRIAL, seed=1)
    for _ in range(2):  # a run that goes on appends
        with EventFile(path) as file:
            file.finished(other, DONE)  # finished before this run
            for step in (1, 2, 3):
                file.step(TRIAL, step, 3.0 + step)
            file.note(TRIAL, "what\nwas")
            file.testing(TRIAL)
            file.finished(TRIAL, DONE)
            file.finished(other, TrialResult(other, reason="out of memory"))
        clock = iter([10.0, 10.5, 11.25])
    lines = told(path)
    assert lines[: len(lines) // 2] != [] and len(lines) % 2 == 0
    first = lines[: len(lines) // 2]
    assert [line["event"] for line in first] == [
        "step",
        "step",
        "note",
        "testing",
        *["finished"] * 2,
    ]
    assert [(line["step"], line["loss"], line["steps"]) for line in first[:2]] == [
        (1, 4.0, TRIAL.steps),
        (3, 6.0, TRIAL.steps),
    ]
    assert first[2]["text"] == "what\nwas"
    assert [line["reason"] for line in first[4:]] == [None, "out of memory"]
    assert [line["seed"] for line in first[4:]] == [0, 1]
    assert all(line["trial"] and line["time"].endswith("+00:00") for line in lines)


def test_a_full_disk_loses_events_and_stops_nothing(tmp_path):
    with EventFile(tmp_path / "events.jsonl") as file:

        class Full:
            def write(self, text):
                raise OSError(28, "No space left on device")

            def close(self):
                raise OSError(28, "No space left on device")

        file.file.close()
        file.file = Full()  # type: ignore[assignment]
        file.note(TRIAL, "lost")


def test_all_watchers_hear_all(tmp_path):
    heard = []

    class Ear:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            heard.append((self.name, "closed"))

        def __getattr__(self, what):
            return lambda trial, *values, **named: heard.append(
                (self.name, what, *values, *named.values())
            )

    class Says:
        """An engine whose one trial says all that there is."""

        events = iter(
            [
                {"kind": "step", "step": 1, "loss": 2.0},
                {"kind": "testing"},
                {"kind": "note", "text": "text"},
                DONE,
            ]
        )

        def num_slots(self):
            return 1

        def submit(self, trial):
            assert trial == TRIAL

        def wait(self):
            return TRIAL, next(self.events)

    with ExitStack() as stack:
        ears = [stack.enter_context(Ear(name)) for name in "ab"]
        run_trials(tmp_path, [TRIAL], Says(), ears)  # type: ignore[arg-type]
    for name in "ab":
        mine = [each[1:] for each in heard if each[0] == name]
        expected = [("step", 1, 2.0), ("testing",), ("note", "text"), ("finished", DONE)]
        assert mine == [*expected, ("closed",)]


def test_tensorboard_shows_the_curves(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (extra cluster)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoard(tmp_path) as board:
        board.step(TRIAL, 1, 4.0)
        board.finished(TRIAL, DONE)
        board.finished(dataclasses.replace(TRIAL, seed=1), DONE)  # of an earlier run
    (run,) = tmp_path.iterdir()
    assert run.name == TRIAL.folder
    found = EventAccumulator(str(run))
    found.Reload()
    curves = {
        name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]
    }
    assert curves == {
        "loss": [(1, 4.0)],
        "training": [(5, 3.5), (10, 2.5)],
        "validation": [(5, 3.25), (10, 2.75)],
    }


def test_tensorboard_that_is_not_installed_is_refused_first(tmp_path, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    out = tmp_path / "runs" / "out"
    code, said, err = call("compare", "rope", "--task", "copy", "--tensorboard", "--out", out)
    assert (code, said) == (2, "") and not out.parent.exists()
    assert err.endswith('tensorboard is not installed: pip install "posenc[cluster]"\n')
    study = Study("", "", "", {}, {}, None, (TRIAL,))
    with open_watchers(Console(), study, tmp_path, 1, False) as found:
        assert len(found) == 2


def test_the_folder_of_tensorboard_is_no_link(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=None))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tensorboard").symlink_to("elsewhere")
    with pytest.raises(ValueError, match="a link, or not a folder"):
        TensorBoard(tmp_path / "tensorboard")
    assert TensorBoard(tmp_path / "board").folder.is_dir()
