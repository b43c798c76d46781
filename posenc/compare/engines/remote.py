"""What engines of other machines have in common: jobs, losses, results that come from a storage."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posenc.compare.engines.engine import Heard
from posenc.compare.engines.job import Job
from posenc.compare.engines.node import facts
from posenc.compare.engines.storage import Storage, take_result
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.files import is_done, path_of
from posenc.compare.trial.process import WORKER, write_failure
from posenc.tasks.known import TEXT

MOST = 3
"""Losses in a row, without a step beyond those before, after which a trial counts as failed: more
often than that it is the trial that ends its machines."""


@dataclass
class Progress:
    """How far a trial has come, and how often it was lost there."""

    step: int = 0
    step_when_lost: int = -1
    losses: int = 0

    def lost(self) -> bool:
        """Count a loss. Returns: whether the trial is worth another start."""
        self.losses = 1 if self.step > self.step_when_lost else self.losses + 1
        self.step_when_lost = self.step
        return self.losses <= MOST


class Remote:
    """The half of an engine that does not depend on who owns the machines.

    A subclass has `send`, which gives a job to them, and `poll`, which waits a moment and calls
    `told`, `ended` and `lost`.
    """

    def __init__(self, storage: str | None, module: str = WORKER) -> None:
        self.storage = None if storage is None else Storage(storage)
        self.module, self.here = module, facts()
        self.progress: dict[TrialConfig, Progress] = {}
        self.heard: deque[tuple[TrialConfig, Heard]] = deque()

    def settle(self, folder: Path, trials: Sequence[TrialConfig], checkpoint_steps: int) -> None:
        self.folder, self.checkpoint_steps = folder.absolute(), checkpoint_steps
        if self.storage is None:
            return
        for corpus in {trial.corpus for trial in trials if trial.task == TEXT}:
            self.storage.give_text(path_of(folder, corpus))
        finished = self.storage.with_results()
        for trial in trials:
            if trial.folder in finished and not is_done(folder, trial):
                take_result(self.storage, folder / trial.folder)

    def submit(self, trial: TrialConfig) -> None:
        home = self.folder / trial.folder
        home.mkdir(parents=True, exist_ok=True)
        (home / "result.json").unlink(missing_ok=True)
        write_trial(home, trial)
        self.progress[trial] = Progress()
        self.send(trial, self._job(trial))

    def wait(self) -> tuple[TrialConfig, Heard]:
        while not self.heard:
            self.poll()
        return self.heard.popleft()

    def send(self, trial: TrialConfig, job: Job) -> None:
        raise NotImplementedError

    def poll(self) -> None:
        raise NotImplementedError

    def told(self, trial: TrialConfig, event: dict[str, Any]) -> None:
        """Pass on what a trial has said."""
        progress = self.progress.get(trial)
        if progress is not None:  # else the end of the trial was faster than its last words
            progress.step = max(progress.step, event.get("step", 0))
            self.heard.append((trial, event))

    def ended(self, trial: TrialConfig, result: TrialResult) -> None:
        """Keep the result of a trial, which may be a failure of its own."""
        del self.progress[trial]
        if result.reason is not None:
            write_failure(self.folder / trial.folder, result)
        elif self.storage is not None:
            take_result(self.storage, self.folder / trial.folder)
        self.heard.append((trial, result))

    def lost(self, trial: TrialConfig, why: str) -> None:
        """Start a trial again that has ended through no fault of its own."""
        progress = self.progress[trial]
        if not progress.lost():
            reason = f"lost {progress.losses} times at step {progress.step}: {why}"
            self.ended(trial, TrialResult(trial, reason=reason))
            return
        self.told(trial, {"kind": "note", "text": f"{why}; it goes on from its last checkpoint"})
        self.send(trial, self._job(trial))

    def _job(self, trial: TrialConfig) -> Job:
        return Job(
            replace(trial, torch=str(trial.torch)),  # torch's own kind of string would load torch
            str(self.folder),
            "" if self.storage is None else self.storage.url,
            self.checkpoint_steps,
            self.here,
            str(Path.cwd()),
            self.module,
        )
