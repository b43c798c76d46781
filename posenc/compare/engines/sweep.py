"""Run the trials of a study, several at a time, on any engine."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from posenc.compare.engines.engine import Engine
from posenc.compare.plan import splits
from posenc.compare.results import TrialResult
from posenc.compare.trial.checkpoint import clear_checkpoint
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.files import CorruptResult, load_result
from posenc.report.atomic import remove_partials


class Watcher(Protocol):
    """Hears what happens while the trials run."""

    def step(self, trial: TrialConfig, step: int, loss: float) -> None: ...
    def testing(self, trial: TrialConfig) -> None: ...
    def note(self, trial: TrialConfig, text: str) -> None: ...
    def finished(self, trial: TrialConfig, result: TrialResult) -> None: ...


def run_trials(
    folder: Path, trials: Sequence[TrialConfig], engine: Engine, watcher: Watcher
) -> None:
    """Run all trials that have no result yet, on an engine that is settled. A trial that failed in
    an earlier call runs again.

    After an interruption of any kind the same call goes on from the last checkpoints.
    """
    waiting: deque[TrialConfig] = deque()
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
    running = 0
    while waiting or running:
        while waiting and running < engine.slots():
            engine.start(waiting.popleft())
            running += 1
        trial, heard = engine.hear()
        if isinstance(heard, TrialResult):
            running -= 1
            watcher.finished(trial, heard)
        else:
            _tell(watcher, trial, heard)


def remove_leftovers(folder: Path) -> None:
    """Delete the half-written files that killed runs left in a study's folder.

    Call it only while holding the folder's lock.
    """
    for path in folder.glob(f"corpus-*{splits.PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    remove_partials(folder)


def _tell(watcher: Watcher, trial: TrialConfig, event: dict[str, Any]) -> None:
    if event["kind"] == "step":
        watcher.step(trial, event["step"], event["loss"])
    elif event["kind"] == "testing":
        watcher.testing(trial)
    elif event["kind"] == "note":
        watcher.note(trial, event["text"])
