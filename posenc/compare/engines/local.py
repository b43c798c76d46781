"""Trials as processes of this machine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posenc.compare.engines.engine import Heard
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import WORKER, TrialProcess


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
