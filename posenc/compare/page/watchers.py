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
"""Name of the file of events in a study's folder."""


@contextlib.contextmanager
def open_watchers(
    console: Console, study: Study, folder: Path, workers: int, tensorboard: bool
) -> Iterator[list[Any]]:
    """Open what follows the trials, for the block under `with`: the screen, a file of events in the
    study's folder and, with `tensorboard`, files for TensorBoard."""
    plain_lines = contextlib.nullcontext(PlainLines(console))
    bars_or_lines = LiveBars(console, study.trials, workers) if console.is_terminal else plain_lines
    boards = [TensorBoard(folder / "tensorboard")] if tensorboard else []
    with contextlib.ExitStack() as stack:
        watchers = (bars_or_lines, EventFile(folder / EVENTS), *boards)
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
        self.last_step_time: dict[TrialConfig, float] = {}

    def __enter__(self) -> "EventFile":
        self.file = append_to(self.path)
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self.file.close()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        """Write a step, at most once a second of each trial."""
        now = time.monotonic()
        if now - self.last_step_time.get(trial, -1.0) >= 1.0:  # -1: the first step always
            self.last_step_time[trial] = now
            self._write("step", trial, step=step, steps=trial.steps, loss=loss)

    def testing(self, trial: TrialConfig) -> None:
        """Write that the trial is tested now."""
        self.last_step_time.setdefault(trial, 0.0)  # `finished` tells by it that the trial ran
        self._write("testing", trial)

    def note(self, trial: TrialConfig, text: str) -> None:
        """Write a note on the trial."""
        self._write("note", trial, text=text)

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        """Write that the trial has ended, unless it had finished before this run."""
        if self.last_step_time.pop(trial, None) is not None or result.reason is not None:
            self._write("finished", trial, reason=result.reason)

    def _write(self, event: str, trial: TrialConfig, **values: Any) -> None:
        """Append a line with the event, the time, the trial and these values."""
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
        self.writer_class = SummaryWriter
        self.writers: dict[TrialConfig, Any] = {}

    def __exit__(self, *exc: object) -> None:
        for writer in self.writers.values():
            writer.close()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        """Add the loss of a step to the curve of a running trial."""
        self._writer_of(trial).add_scalar("loss", loss, step)

    def testing(self, trial: TrialConfig) -> None:
        """Make the trial's run if there is none, so that `finished` adds its curves."""
        self._writer_of(trial)

    def note(self, trial: TrialConfig, text: str) -> None:
        """Add a text to the trial's run."""
        self._writer_of(trial).add_text("note", text)

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        """Add the curves of training and validation, and close the trial's run."""
        if trial not in self.writers:  # finished in an earlier run, which wrote it
            return
        writer = self.writers.pop(trial)
        for point in result.training:
            writer.add_scalar("training", point.train, point.step)
            writer.add_scalar("validation", point.valid, point.step)
        writer.close()

    def _writer_of(self, trial: TrialConfig) -> Any:
        """Return the TensorBoard writer of a trial; the first call makes it."""
        if trial not in self.writers:
            self.writers[trial] = self.writer_class(str(self.folder / trial.folder))
        return self.writers[trial]
