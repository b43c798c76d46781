"""What follows the trials: bars or lines on the screen, a file of events, TensorBoard."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from posenc.command_line.progress import Bars, Pace, readable_duration
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.files.opening import make_subfolder, open_to_append
from posenc.report.terminal import print_line
from posenc.tasks.registry import TEXT
from posenc.tasks.task import Case

EVENTS_FILE = "events.jsonl"
"""Name of the file of events in a study's folder."""
LINES_PER_TRIAL = 10
"""Plain lines per trial: chosen."""
ALL_TRIALS = "all trials"
"""Name of the bar of all trials together."""


@contextlib.contextmanager
def open_watchers(
    console: Console, study: Study, folder: Path, workers: int, tensorboard: bool
) -> Iterator[list[Any]]:
    """Yield the watchers, objects with a method for each event of a trial, opened for the block
    under `with`: of the screen, of a file of events in the study's folder and, with `tensorboard`,
    of files for TensorBoard."""
    study_pace = StudyPace(study.trials, workers)
    plain_lines = contextlib.nullcontext(PlainLines(console, study_pace))
    bars_or_lines = LiveBars(console, study_pace) if console.is_terminal else plain_lines
    boards = [TensorBoard(folder / "tensorboard")] if tensorboard else []
    with contextlib.ExitStack() as stack:
        watchers = (bars_or_lines, EventFile(folder / EVENTS_FILE), *boards)
        yield [stack.enter_context(watcher) for watcher in watchers]


def unit_of_loss(trial: TrialConfig) -> str:
    """Return what a trial's loss in bits is counted for: "byte" or "token" of a text, "target" of a
    task."""
    return trial.loss_unit if trial.task == TEXT else "target"


class StudyPace:
    """Counts the steps and the trials of a study that are done, and estimates the time left."""

    def __init__(self, trials: Sequence[TrialConfig], workers: int) -> None:
        self.step_by_trial = dict.fromkeys(trials, 0)
        self.total_steps = sum(trial.steps for trial in trials)
        self.workers = workers
        self.paces: dict[TrialConfig, Pace] = {}
        self.seconds_per_step: float | None = None

    def step(self, trial: TrialConfig, step: int) -> float | None:
        """Count a step of a trial. Return the seconds left for this trial; None before its second
        step."""
        self.step_by_trial[trial] = step
        seconds_per_step = self.paces.setdefault(trial, Pace(step)).seconds_per_step(step)
        if seconds_per_step is None:
            return None
        self.seconds_per_step = seconds_per_step
        return seconds_per_step * (trial.steps - step)

    def finished(self, trial: TrialConfig) -> None:
        """Count a trial that has ended, which a failure may have done before its last step."""
        self.step_by_trial[trial] = trial.steps

    def num_steps_done(self) -> int:
        """Return how many steps of all trials are done."""
        return sum(self.step_by_trial.values())

    def seconds_left(self) -> float | None:
        """Return the seconds left for all trials if all workers are as fast as the last step that
        was seen; None if none was."""
        if self.seconds_per_step is None:
            return None
        num_steps_left = self.total_steps - self.num_steps_done()
        return self.seconds_per_step * num_steps_left / self.workers

    def trials_in_words(self) -> str:
        """Return how many trials have come to their last step: "3 of 12"."""
        num_ended = sum(step == trial.steps for trial, step in self.step_by_trial.items())
        return f"{num_ended} of {len(self.step_by_trial)}"


class PlainLines:
    """Print a line at every tenth of a trial, with the time left for it and for all trials."""

    def __init__(self, console: Console, study_pace: StudyPace) -> None:
        self.console = console
        self.study_pace = study_pace
        self.tenths_printed: dict[TrialConfig, int] = {}

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        """Print step, loss and the times left if the trial has come to another tenth."""
        trial_seconds_left = self.study_pace.step(trial, step)
        tenth = step * LINES_PER_TRIAL // trial.steps
        # A trial that goes on from a checkpoint begins with the tenth it had reached.
        if tenth > self.tenths_printed.setdefault(trial, tenth):
            self.tenths_printed[trial] = tenth
            progress = (
                f"step {step} of {trial.steps}, loss {loss:.3f} bits per {unit_of_loss(trial)}"
            )
            trial_left = readable_duration(trial_seconds_left or 0.0)
            study_left = readable_duration(self.study_pace.seconds_left() or 0.0)
            study_progress = f"{ALL_TRIALS}: {self.study_pace.trials_in_words()}, {study_left} left"
            self.note(trial, f"{progress}, {trial_left} left; {study_progress}")

    def testing(self, trial: TrialConfig) -> None:
        """Print that the trial is tested now."""
        self.note(trial, "testing")

    def note(self, trial: TrialConfig, text: str) -> None:
        """Print a line about the trial."""
        print_line(self.console, f"{describe_trial(trial)}: {text}")

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        """Print the scores of a trial that has ended, or why it failed."""
        self.study_pace.finished(trial)
        print_line(self.console, describe_outcome(trial, result))


class LiveBars:
    """Show one bar for all trials and one per running trial, with loss and time left."""

    def __init__(self, console: Console, study_pace: StudyPace) -> None:
        self.bars = Bars(console)
        self.study_pace = study_pace
        self._show_total()

    def __enter__(self) -> "LiveBars":
        self.bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def step(self, trial: TrialConfig, step: int, loss: float) -> None:
        """Update the bars of the trial and of all trials."""
        seconds_left = self.study_pace.step(trial, step)
        remark = f"loss {loss:.3f} bits/{unit_of_loss(trial)}"
        self.bars.show(describe_trial(trial), step, trial.steps, remark, seconds_left)
        self._show_total()

    def testing(self, trial: TrialConfig) -> None:
        """Fill the bar of the trial, and show that it is tested now."""
        self.bars.show(describe_trial(trial), trial.steps, trial.steps, "testing")

    def note(self, trial: TrialConfig, text: str) -> None:
        """Print a line about the trial above the bars."""
        self.bars.print_line(f"{describe_trial(trial)}: {text}")

    def finished(self, trial: TrialConfig, result: TrialResult) -> None:
        """Replace the bar of a trial that has ended by a line with its scores, or why it failed."""
        self.bars.remove(describe_trial(trial))
        self.study_pace.finished(trial)
        self.bars.print_line(describe_outcome(trial, result))
        self._show_total()

    def _show_total(self) -> None:
        """Update the bar of all trials: steps done, trials ended and the time left."""
        self.bars.show(
            ALL_TRIALS,
            self.study_pace.num_steps_done(),
            self.study_pace.total_steps,
            self.study_pace.trials_in_words(),
            self.study_pace.seconds_left(),
        )


def describe_outcome(trial: TrialConfig, result: TrialResult) -> str:
    """Return a line about a trial that has ended."""
    if result.reason is not None:
        return f"{describe_trial(trial)}: failed: {result.reason}"
    labelled_scores = [(str(score.length), score.bits_per_byte) for score in result.by_length]
    labelled_scores += [(str(Case(s.length, s.variant)), s.exact_match) for s in result.by_case]
    scores_in_words = ", ".join(
        f"{case_label}: {'cannot' if score_value is None else f'{score_value:.3f}'}"
        for case_label, score_value in labelled_scores
    )
    metric = f"bits per {unit_of_loss(trial)}" if trial.is_on_text else "exact match"
    return f"{describe_trial(trial)}: done; {metric} at {scores_in_words}"


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
        self.file = open_to_append(self.path)
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

        self.folder = make_subfolder(folder)
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
