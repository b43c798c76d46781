"""A trial on another machine: what it must be told, and what runs there."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posenc.compare.engines.node import difference, facts
from posenc.compare.engines.storage import Mirror, Storage, one_line, take_checkpoint
from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.files import path_of
from posenc.compare.trial.process import WORKER, TrialProcess
from posenc.tasks.known import TEXT

Tell = Callable[[dict[str, Any]], None]


class Lost(Exception):
    """The trial has ended through no fault of its own and may go on elsewhere."""


@dataclass(frozen=True)
class Job:
    """A trial, and where its files are.

    Args:
        trial: the trial.
        folder: the study's folder, which all machines see; with a storage, unused.
        storage: URL of the storage, "" where the folder is shared.
        checkpoint_steps: steps between two checkpoints.
        here: facts of the machine that the command runs on.
        cwd: its current folder, from which files with encodings are named.
        module: what the trial's process runs.
    """

    trial: TrialConfig
    folder: str
    storage: str
    checkpoint_steps: int
    here: dict[str, str]
    cwd: str
    module: str = WORKER

    def run(self, tell: Tell) -> TrialResult:
        """Run the trial on this machine. Raises: Lost."""
        differs = difference(self.here, facts())
        if differs is not None:
            raise Lost(f"{platform.node()}: {differs}")
        if self.trial.code and Path(self.cwd).is_dir():
            os.chdir(self.cwd)
        if not self.storage:
            return self._run_below(Path(self.folder), tell)
        with tempfile.TemporaryDirectory(prefix="posenc-") as scratch:
            try:
                return self._run_with(Storage(self.storage), Path(scratch), tell)
            except OSError as error:
                raise Lost(f"{self.storage}: {one_line(error)}") from error

    def _run_with(self, storage: Storage, folder: Path, tell: Tell) -> TrialResult:
        if self.trial.task == TEXT:
            kept = path_of(texts_of_this_machine(), self.trial.corpus)
            storage.take_text(kept)
            path_of(folder, self.trial.corpus).symlink_to(kept)
        home = folder / self.trial.folder
        take_checkpoint(storage, home)
        with Mirror(storage, home) as mirror:
            result = self._run_below(folder, tell)
        if mirror.wrong:
            tell({"kind": "note", "text": f"a checkpoint could not be kept: {mirror.wrong}"})
        if result.reason is None:
            mirror.copy_result()
        return result

    def _run_below(self, folder: Path, tell: Tell) -> TrialResult:
        process = TrialProcess(folder, self.trial, self.checkpoint_steps, self.module)
        try:
            for event in process.events():
                tell(event)
        finally:
            process.kill()
        signal = process.killed_by()
        if signal is not None:
            raise Lost(f"its process was ended by {signal}")
        return process.result()


def every(seconds: float, tell: Tell) -> Tell:
    """Tell all but steps that follow the last event sooner than this."""
    last = 0.0

    def told(event: dict[str, Any]) -> None:
        nonlocal last
        now = time.monotonic()
        if event["kind"] != "step" or now - last >= seconds:
            last = now
            tell(event)

    return told


def texts_of_this_machine() -> Path:
    """Return where texts are kept between trials; no other user can write there."""
    folder = Path(tempfile.gettempdir()) / f"posenc-texts-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    return folder
