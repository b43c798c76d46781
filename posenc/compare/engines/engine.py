"""What an engine is, and the one that runs trials as processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import TrialProcess

Heard = dict[str, Any] | TrialResult
"""An event of a trial, of the kinds step, testing and note; or the result with which it ended."""


class Engine(Protocol):
    """Runs trials. A trial is the same process on every engine, so its numbers do not depend on it.

    Used in this order: `slots`, `settle`, then `submit` and `wait` in turn, and `cancel` at last.

    about: what the report says about where the trials run.
    """

    about: dict[str, str]

    def slots(self) -> int:
        """Return how many trials it runs at a time, now."""
        ...

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Make the study's folder, with its text, known where trials run. Raises: ValueError where
        trials cannot read or write there."""

    def submit(self, trial: TrialConfig) -> None:
        """Begin a trial, from its last checkpoint where it has one."""

    def wait(self) -> tuple[TrialConfig, Heard]:
        """Wait for the next that happens to a trial that was submitted."""
        ...

    def cancel(self) -> None:
        """End what still runs. Results and checkpoints stay."""


class Local:
    """`workers` trials at a time, each with a thread that listens to it.

    gpus: GPUs as CUDA_VISIBLE_DEVICES names them, of which worker i uses the i-th; more workers
        share them in turn. Without any, a trial sees what this process sees.
    """

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self.workers, self.gpus, self.about = workers, gpus, {}
        self.free = list(range(workers))
        self.running: dict[TrialConfig, tuple[int, TrialProcess, threading.Thread]] = {}
        self.heard: queue.Queue[tuple[TrialConfig, dict[str, Any] | None]] = queue.Queue()

    def slots(self) -> int:
        return self.workers

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        self.folder, self.checkpoint_steps = folder, checkpoint_steps

    def submit(self, trial: TrialConfig) -> None:
        worker = min(self.free)
        gpu = self.gpus[worker % len(self.gpus)] if self.gpus else None
        started = TrialProcess(self.folder, trial, self.checkpoint_steps, gpu=gpu)
        self.free.remove(worker)
        listener = threading.Thread(target=self._listen, args=(started,), daemon=True)
        self.running[trial] = worker, started, listener
        listener.start()

    def wait(self) -> tuple[TrialConfig, Heard]:
        trial, event = self.heard.get()
        if event is not None:
            return trial, event
        worker, ended, _ = self.running.pop(trial)
        self.free.append(worker)
        return trial, ended.result()

    def cancel(self) -> None:
        for _, started, _ in self.running.values():
            started.kill()
        for _, _, listener in self.running.values():
            listener.join()

    def _listen(self, started: TrialProcess) -> None:
        for event in started.events():
            self.heard.put((started.trial, event))
        self.heard.put((started.trial, None))
