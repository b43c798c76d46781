"""Trials as processes of this machine: an engine of them, and the process of one."""

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


class Local:
    """`workers` trials at a time, each with a thread that listens to it.

    module: what a trial's process runs.
    """

    def __init__(self, workers: int, module: str = WORKER) -> None:
        self.workers, self.module = workers, module
        self.running: dict[TrialConfig, tuple[TrialProcess, threading.Thread]] = {}
        self.heard: queue.Queue[tuple[TrialConfig, Heard | None]] = queue.Queue()

    def slots(self) -> int:
        return self.workers

    def describe(self) -> dict[str, str]:
        return {}

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        self.folder, self.checkpoint_steps = folder, checkpoint_steps

    def start(self, trial: TrialConfig) -> None:
        process = TrialProcess(self.folder, trial, self.checkpoint_steps, self.module)
        listener = threading.Thread(target=self._listen, args=(process,), daemon=True)
        self.running[trial] = process, listener
        listener.start()

    def hear(self) -> tuple[TrialConfig, Heard]:
        trial, event = self.heard.get()
        if event is not None:
            return trial, event
        process, _ = self.running.pop(trial)
        return trial, process.result()

    def close(self) -> None:
        for running, _ in self.running.values():
            running.kill()
        for _, listener in self.running.values():
            listener.join()

    def _listen(self, process: TrialProcess) -> None:
        for event in process.events():
            self.heard.put((process.trial, event))
        self.heard.put((process.trial, None))


class TrialProcess:
    """A trial that has been started below `folder`, where its text lies too."""

    def __init__(
        self, folder: Path, trial: TrialConfig, checkpoint_steps: int, module: str = WORKER
    ) -> None:
        self.folder, self.trial = folder, trial
        self.home = folder / trial.folder
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
        """What the trial tells, until its process has ended."""
        with self.process as process:
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(ValueError):  # half a line of a process that was killed
                    yield json.loads(line)
            process.wait()  # before stdin closes, which would end it

    def kill(self) -> None:
        self.process.kill()

    def killed_by(self) -> str | None:
        """The signal that ended the process, after `events`; None where it ended by itself."""
        code = self.process.returncode
        return signal.Signals(-code).name if code < 0 else None

    def result(self) -> TrialResult:
        """The result that the process wrote; if it died before that, a failure that says how."""
        try:
            result = load_result(self.folder, self.trial)
        except CorruptResult as error:
            result = TrialResult(self.trial, reason=f"the result is corrupt ({error})")
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
        lines = text.strip().splitlines()
        said = f": {lines[-1][:300]}" if lines else ""
        return f"its process ended with code {self.process.returncode}{said}"


def write_failure(home: Path, result: TrialResult) -> None:
    """Keep why a trial failed, if there is room for it."""
    with contextlib.suppress(OSError):  # the disk may be full
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(home / "result.json", result.to_json())
