"""The process of a trial: how it is started, what it tells, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from posenc.compare.results import TrialResult
from posenc.compare.trial.config import TrialConfig, write_trial
from posenc.compare.trial.files import CorruptResult, load_result
from posenc.report.files.atomic import write_atomically

if sys.platform == "linux":
    import fcntl

# The process must run the same posenc as this one, wherever that is installed, and no module from
# the current folder, which is the user's. -P keeps the current folder out of the path; the folder
# of the package is in the path only for one import.
_START = """\
import importlib, sys, typing
sys.path.insert(0, sys.argv[1])
import posenc
del sys.path[0]
sys.exit(importlib.import_module(sys.argv[2]).main(*sys.argv[3:]))
"""
WORKER = "posenc.compare.trial.worker"
"""What a trial's process runs."""
Tell = Callable[[dict[str, Any]], None]
"""Hears an event of a trial."""
ORPHANED = 3
"""Exit code of a process whose starting process is gone."""


def command(module: str, *arguments: object) -> list[str]:
    """The command that calls `main` of a module with this process's number and the arguments, as
    strings. `main` calls `end_with_parent` first."""
    package = Path(__file__).resolve().parents[3]
    given = [package, module, os.getpid(), *arguments]
    return [sys.executable, "-P", "-c", _START, *map(str, given)]


def environment(device: str) -> dict[str, str]:
    """The environment in which a trial is trained, and its speed is measured."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        # One thread each: bit-identical sums, and processes scale better than threads do.
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # glibc keeps freed blocks instead of returning them to the system at every step.
        environment |= {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "-1"}
    else:
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return environment


def end_with_parent(parent: int) -> None:
    """End this process when `parent` ends, which holds the other end of stdin.

    On Linux the kernel tells of the closed pipe with SIGIO, which ends the process whatever it is
    doing; elsewhere a thread that reads stdin ends it when Python next runs.
    """
    if sys.platform == "linux":
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
        if os.getppid() != parent:  # gone before the kernel was asked
            os._exit(ORPHANED)
    else:
        threading.Thread(target=_end_with_stdin, daemon=True).start()


def _end_with_stdin() -> None:
    # Not sys.stdin, whose lock a thread must not hold when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(ORPHANED)


class TrialProcess:
    """A trial that has been started below `folder`, where its text is too."""

    def __init__(
        self, folder: Path, trial: TrialConfig, checkpoint_steps: int, module: str = WORKER
    ) -> None:
        self.folder, self.trial = folder, trial
        self.home = make_home(folder, trial)
        with (self.home / "log.txt").open("a", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command(module, folder, self.home, checkpoint_steps),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=environment(trial.device),
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


def make_home(folder: Path, trial: TrialConfig) -> Path:
    """Make a trial's folder below `folder`, with its config and without a result."""
    home = folder / trial.folder
    home.mkdir(parents=True, exist_ok=True)
    (home / "result.json").unlink(missing_ok=True)
    write_trial(home, trial)
    return home


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


def write_failure(home: Path, result: TrialResult) -> None:
    """Keep why a trial failed, if there is room for it."""
    with contextlib.suppress(OSError):  # the disk may be full
        home.mkdir(parents=True, exist_ok=True)
        write_atomically(home / "result.json", result.to_json())
