"""What an engine is, and the one that runs trials as processes of this machine."""

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.process import TrialProcess

TrialEvent = dict[str, Any] | TrialResult
"""An event of a trial, of the kinds step, testing and note; or the result with which it ended."""


class Engine(Protocol):
    """Runs trials. A trial is the same process on every engine, so its numbers do not depend on it.

    Used in this order: `slots`, `prepare`, then `submit` and `wait` in turn, and `cancel` at last.

    about: what the report says about where the trials run.
    """

    about: dict[str, str]

    def slots(self) -> int:
        """Return how many trials it runs at a time, now."""
        ...

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Make the study's folder, with its text, known where trials run. Raises: ValueError where
        trials cannot read or write there."""

    def submit(self, trial: TrialConfig) -> None:
        """Begin a trial, from its last checkpoint where it has one."""

    def wait(self) -> tuple[TrialConfig, TrialEvent]:
        """Wait for the next event of any submitted trial; return the trial and the event."""
        ...

    def cancel(self) -> None:
        """End what still runs. Results and checkpoints stay."""


class LocalEngine:
    """`workers` trials at a time, each with a thread that listens to it.

    gpus: as CUDA_VISIBLE_DEVICES names them; a trial gets the one with the fewest trials.
    """

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self.workers = workers
        self.gpus = gpus
        self.about = {}
        self.running: dict[TrialConfig, tuple[TrialProcess, threading.Thread, str | None]] = {}
        self.events: queue.Queue[tuple[TrialConfig, dict[str, Any] | None]] = queue.Queue()

    def slots(self) -> int:
        """Return the number of workers."""
        return self.workers

    def prepare(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        """Keep the folder, which trials of this machine can read and write."""
        self.folder = folder
        self.checkpoint_steps = checkpoint_steps

    def submit(self, trial: TrialConfig) -> None:
        """Start the process of a trial, and a thread that listens to it."""
        used = [gpu for _, _, gpu in self.running.values()]
        gpu = min(self.gpus, key=used.count, default=None)
        started = TrialProcess(self.folder, trial, self.checkpoint_steps, gpu=gpu)
        listener = threading.Thread(target=self._listen, args=(started,), daemon=True)
        self.running[trial] = started, listener, gpu
        listener.start()

    def wait(self) -> tuple[TrialConfig, TrialEvent]:
        """Return a trial and its next event, or its result if its process has ended."""
        trial, event = self.events.get()
        return trial, self.running.pop(trial)[0].result() if event is None else event

    def cancel(self) -> None:
        """Kill all processes, and wait for the threads that listen to them."""
        for started, _, _ in self.running.values():
            started.kill()
        for _, listener, _ in self.running.values():
            listener.join()

    def _listen(self, started: TrialProcess) -> None:
        """Queue the events of a trial for `wait`, and None when its process has ended."""
        for event in started.events():
            self.events.put((started.trial, event))
        self.events.put((started.trial, None))
