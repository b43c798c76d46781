"""What follows the trials beside the screen: a file of events, and TensorBoard."""

import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from posenc.compare.page.progress import LiveBars, PlainLines
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.report.files.opened import append_to, make_inside

EVENTS = "events.jsonl"


@contextlib.contextmanager
def open_watchers(
    console: Console, study: Study, folder: Path, workers: int, tensorboard: bool
) -> Iterator[list[Any]]:
    """Open what follows the trials, for the block under `with`: the screen, a file of events in the
    study's folder and, with `tensorboard`, files for TensorBoard."""
    live = console.is_terminal
    plain = contextlib.nullcontext(PlainLines(console))
    screen = LiveBars(console, study.trials, workers) if live else plain
    boards = [TensorBoard(folder / "tensorboard")] if tensorboard else []
    with contextlib.ExitStack() as stack:
        watchers = (screen, EventFile(folder / EVENTS), *boards)
        yield [stack.enter_context(watcher) for watcher in watchers]


class EventFile:
    """Appends a line of JSON for all that happens: {"time": "2026-01-31T12:00:00.123+00:00",
    "event": "step", "trial": "rope-seed0-0123456789ab", "encoding": "rope", "task": "text",
    "seed": 0, "step": 25, "steps": 300, "loss": 3.1}.

    The events are step (once a second of a trial), testing, note (with "text") and finished (with
    "reason", null where the trial did not fail). A run that goes on appends; its finished trials
    are not told again. A disk that is full loses events and stops no trial.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last: dict[TrialConfig, float] = {}

    def __enter__(self) -> "EventFile":
        self.file = append_to(self.path)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.file.close()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        now = time.monotonic()
        if now - self.last.get(trial, -1.0) >= 1.0:
            self.last[trial] = now
            self._write("step", trial, step=step, steps=trial.steps, loss=loss)

    def testing(self, trial: TrialConfig) -> None:
        self.last.setdefault(trial, 0.0)
        self._write("testing", trial)

    def note(self, trial: TrialConfig, text: str) -> None:
        self._write("note", trial, text=text)

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        if self.last.pop(trial, None) is not None or result.reason is not None:
            self._write("finished", trial, reason=result.reason)

    def _write(self, event: str, trial: TrialConfig, **values: Any) -> None:
        record = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "event": event,
            "trial": trial.folder,
            "encoding": trial.encoding,
            "task": trial.task,
            "seed": trial.seed,
            **values,
        }
        with contextlib.suppress(OSError):
            self.file.write(json.dumps(record) + "\n")


class TensorBoard(contextlib.AbstractContextManager):
    """Writes what TensorBoard shows, one run for each trial: the loss of steps while they run, and
    of a finished trial the curves of training and validation, all in bits.

    Raises: ValueError where the folder is a link.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = make_inside(folder)
        self.make = SummaryWriter
        self.writers: dict[TrialConfig, Any] = {}

    def __exit__(self, *exc: object) -> None:
        for writer in self.writers.values():
            writer.close()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        self._writer(trial).add_scalar("loss", loss, step)

    def testing(self, trial: TrialConfig) -> None:
        self._writer(trial)

    def note(self, trial: TrialConfig, text: str) -> None:
        self._writer(trial).add_text("note", text)

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        if trial not in self.writers:  # finished in an earlier run, which wrote it
            return
        writer = self.writers.pop(trial)
        for point in result.training:
            writer.add_scalar("training", point.train, point.step)
            writer.add_scalar("validation", point.valid, point.step)
        writer.close()

    def _writer(self, trial: TrialConfig) -> Any:
        if trial not in self.writers:
            self.writers[trial] = self.make(str(self.folder / trial.folder))
        return self.writers[trial]
