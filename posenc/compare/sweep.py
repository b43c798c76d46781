"""Run the trials of a study, several at a time, each in its own process."""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.compare import process, splits
from posenc.compare.checkpoint import clear_checkpoint
from posenc.compare.results import Timing, TrialResult
from posenc.compare.trial import TrialConfig, write_trial
from posenc.report.atomic import remove_partials, write_atomically

_WORKER = "posenc.compare.worker"


class Watcher(Protocol):
    """Hears what happens while the trials run."""

    def step(self, trial: TrialConfig, step: int, loss: float) -> None: ...
    def testing(self, trial: TrialConfig) -> None: ...
    def note(self, trial: TrialConfig, text: str) -> None: ...
    def finished(self, trial: TrialConfig, result: TrialResult) -> None: ...


class CorruptResult(Exception):
    """The result on disk cannot be read."""


def load_result(folder: Path, trial: TrialConfig) -> TrialResult | None:
    """The result of `trial` below the study's folder; None where there is none yet.

    Raises: CorruptResult.
    """
    path = folder / trial.folder / "result.json"
    for file in (path, path.with_name("timing.json")):
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise CorruptResult(f"{file} is not an ordinary file")
    try:
        result = TrialResult.from_json(path.read_text(encoding="utf-8"))
        if result.config != trial:
            raise ValueError("it belongs to another trial")
        if result.reason is None:
            timing = Timing.from_json(path.with_name("timing.json").read_text(encoding="utf-8"))
            result = TrialResult(**{**vars(result), "timing": timing})
    except FileNotFoundError as error:
        if path.exists():
            raise CorruptResult(f"{error.filename} is missing") from error
        return None
    except (ValueError, OSError) as error:
        raise CorruptResult(" ".join(str(error).split())) from error
    return result


def is_done(folder: Path, trial: TrialConfig) -> bool:
    """Whether `run_trials` finds a result of this trial."""
    try:
        result = load_result(folder, trial)
    except CorruptResult:
        return False
    return result is not None and result.reason is None


def run_trials(
    folder: Path,
    trials: Sequence[TrialConfig],
    workers: int,
    watcher: Watcher,
    checkpoint_steps: int = 50,
) -> None:
    """Run all trials that have no result yet. A trial that failed in an earlier call runs again.

    After an interruption of any kind the same call goes on from the last checkpoints.
    """
    waiting = []
    for trial in trials:
        try:
            result = load_result(folder, trial)
        except CorruptResult as error:
            watcher.note(trial, f"the result is corrupt ({error}); running this trial again")
            (folder / trial.folder / "result.json").unlink(missing_ok=True)
            result = None
        if result is not None and result.reason is None:
            clear_checkpoint(folder / trial.folder)  # a kill after the result leaves it there
            watcher.finished(trial, result)
        else:
            waiting.append(trial)
    events: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_Worker(folder, waiting.pop(0), checkpoint_steps, events))
            source, event = events.get()
            if event is None:
                running.remove(source)
                watcher.finished(source.trial, source.result())
            else:
                _tell(watcher, source.trial, event)
    finally:
        for started in running:
            started.process.kill()
        for started in running:
            started.listener.join()


def remove_leftovers(folder: Path) -> None:
    """Delete the half-written files that killed runs left in a study's folder.

    Call it only while holding the folder's lock.
    """
    for path in folder.glob(f"corpus-*{splits.PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    remove_partials(folder)


class _Worker:
    """A running trial, and the thread that listens to it."""

    def __init__(
        self, folder: Path, trial: TrialConfig, checkpoint_steps: int, events: queue.Queue
    ) -> None:
        self.folder, self.trial = folder, trial
        self.home = folder / trial.folder
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "result.json").unlink(missing_ok=True)
        write_trial(self.home, trial)
        with (self.home / "log.txt").open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                process.command(_WORKER, folder, self.home, checkpoint_steps),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=process.environment(trial.device),
                start_new_session=True,  # Ctrl-C is for the sweep, which then ends its workers
            )
        self.listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self.listener.start()

    def result(self) -> TrialResult:
        """The result that the process wrote; if it died before that, a failure that says how."""
        try:
            result = load_result(self.folder, self.trial)
        except CorruptResult as error:
            result = TrialResult(self.trial, reason=f"the result is corrupt ({error})")
        if result is None:
            result = TrialResult(
                self.trial, reason=_cause_of_death(self.process.returncode, self.home / "log.txt")
            )
            with contextlib.suppress(OSError):  # the disk may be full
                write_atomically(self.home / "result.json", result.to_json())
        return result

    def _listen(self, events: queue.Queue) -> None:
        with self.process as process:  # closes the pipes and waits
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    events.put((self, json.loads(line)))
        events.put((self, None))


def _tell(watcher: Watcher, trial: TrialConfig, event: dict[str, Any]) -> None:
    if event["kind"] == "step":
        watcher.step(trial, event["step"], event["loss"])
    elif event["kind"] == "testing":
        watcher.testing(trial)
    elif event["kind"] == "note":
        watcher.note(trial, event["text"])


def _cause_of_death(code: int, log: Path) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
        return f"its process was ended by {name}{hint}"
    lines = (
        log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if log.exists()
        else []
    )
    return f"its process ended with code {code}" + (f": {lines[-1][:300]}" if lines else "")
