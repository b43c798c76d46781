"""Trials as processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path

from posenc.compare.engines.engine import Heard
from posenc.compare.engines.trial_process import WORKER, TrialProcess
from posenc.compare.trial.config import TrialConfig


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
        for process, _ in self.running.values():
            process.kill()
        for _, listener in self.running.values():
            listener.join()

    def _listen(self, process: TrialProcess) -> None:
        for event in process.events():
            self.heard.put((process.trial, event))
        self.heard.put((process.trial, None))
