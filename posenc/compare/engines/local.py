"""Trials as processes of this machine: the engine, and the process of one trial."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from posenc.compare.engines.engine import Heard
from posenc.compare.results import TrialResult
from posenc.compare.trial import process
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.files import CorruptResult, load_result
from posenc.report.atomic import write_atomically

WORKER = "posenc.compare.trial.worker"
"""What a trial's process runs."""


class Local:
    """`workers` trials at a time, each with a thread that listens to it."""

    def __init__(self, workers: int, module: str = WORKER) -> None:
        self.workers, self.module = workers, module
        self.running: dict[TrialConfig, tuple[TrialProcess, threading.Thread]] = {}
        self.heard: queue.Queue[tuple[TrialConfig, dict[str, Any] | None]] = queue.Queue()

    def slots(self) -> int:
        return self.workers

    def describe(self) -> dict[str, str]:
        return {}

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        self.folder, self.checkpoint_steps = folder, checkpoint_steps

    def submit(self, trial: TrialConfig) -> None:
        started = TrialProcess(self.folder, trial, self.checkpoint_steps, self.module)
        listener = threading.Thread(target=self._listen, args=(started,), daemon=True)
        self.running[trial] = started, listener
        listener.start()

    def wait(self) -> tuple[TrialConfig, Heard]:
        trial, event = self.heard.get()
        return trial, self.running.pop(trial)[0].result() if event is None else event

    def cancel(self) -> None:
        for started, _ in self.running.values():
            started.kill()
        for _, listener in self.running.values():
            listener.join()

    def _listen(self, started: TrialProcess) -> None:
        for event in started.events():
            self.heard.put((started.trial, event))
        self.heard.put((started.trial, None))


class TrialProcess:
    """A trial that has been started below `folder`, where its text is too."""

    def __init__(
        self, folder: Path, trial: TrialConfig, checkpoint_steps: int, module: str = WORKER
    ) -> None:
        self.folder, self.trial, self.home = folder, trial, folder / trial.folder
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "result.json").unlink(missing_ok=True)
        write_trial(self.home, trial)
        with (self.home / "log.txt").open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                process.command(module, folder, self.home, checkpoint_steps),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=process.environment(trial.device),
                start_new_session=True,  # Ctrl-C is for the sweep, which then ends its workers
            )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield what the trial tells, until its process has ended."""
        with self.process as running:
            assert running.stdout is not None
            for line in running.stdout:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    yield json.loads(line)
            running.wait()  # before stdin closes, which would end it

    def kill(self) -> None:
        self.process.kill()

    def killed_by(self) -> str | None:
        """Return the signal that ended the process, after `events`; None if it ended by itself."""
        code = self.process.returncode
        return signal.Signals(-code).name if code < 0 else None

    def result(self) -> TrialResult:
        """Return the result that the process wrote, or a failure that says how it ended."""
        try:
            result = load_result(self.folder, self.trial)
        except CorruptResult as error:
            return TrialResult(self.trial, reason=f"the result is corrupt ({error})")
        if result is None:
            result = TrialResult(self.trial, reason=self._cause_of_death())
            write_failure(self.home, result)
        return result

    def _cause_of_death(self) -> str:
        name = self.killed_by()
        if name is not None:
            hint = ", perhaps because memory ran out" if name == signal.SIGKILL.name else ""
            return f"its process was ended by {name}{hint}"
        log = self.home / "log.txt"
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        said = f": {text.strip().splitlines()[-1][:300]}" if text.strip() else ""
        return f"its process ended with code {self.process.returncode}{said}"


def write_failure(home: Path, result: TrialResult) -> None:
    """Keep why a trial failed, if there is room for it."""
    with contextlib.suppress(OSError):  # the disk may be full
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(home / "result.json", result.to_json())
