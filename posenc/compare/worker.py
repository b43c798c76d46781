"""The process of one trial.

It reads config.json in the trial's folder and writes there what `run_trial` writes, or a
result.json that says why the trial failed. Progress goes to stdout as lines of JSON. The process
ends when the one that started it ends; it arranges that before it imports torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

# The worker must run the same posenc as this process, wherever that is installed, and no module
# from the current folder, which is the user's. -P keeps the current folder out of the path; the
# folder of the package is in the path only for one import.
_START = """\
import importlib, sys, typing
sys.path.insert(0, sys.argv[1])
import posenc
del sys.path[0]
from posenc.compare import worker
sys.exit(worker.main(*sys.argv[2:]))
"""
_PR_SET_PDEATHSIG = 1
ORPHANED = 3
"""Exit code of a worker whose starting process is gone."""


def command(study_folder: Path, trial_folder: Path, checkpoint_steps: int) -> list[str]:
    """The command that starts a worker. The worker ends when its stdin is closed."""
    package = Path(__file__).resolve().parents[2]
    arguments = [package, os.getpid(), study_folder, trial_folder, checkpoint_steps]
    return [sys.executable, "-P", "-c", _START, *map(str, arguments)]


def main(parent: str, study_folder: str, trial_folder: str, checkpoint_steps: str) -> int:
    end_with_parent(int(parent))
    # What libraries print must not come between the events.
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    from posenc.compare.encodings import code_of
    from posenc.compare.results import TrialResult
    from posenc.compare.run_trial import reason_of, run_trial
    from posenc.compare.train import TrialFailed
    from posenc.compare.trial import read_trial
    from posenc.report.atomic import write_atomically

    folder = Path(trial_folder)
    config = read_trial(folder)
    try:
        if config.code and code_of(config.encoding) != config.code:
            raise TrialFailed(
                f"the code of {config.encoding} has changed since the comparison began; the same "
                "command begins one of the new code"
            )
        run_trial(config, Path(study_folder), folder, _Events(events), int(checkpoint_steps))
    except Exception as error:  # of torch, of the system, of an encoding: all end in a result
        traceback.print_exc()
        failed = TrialResult(config, reason=reason_of(error))
        write_atomically(folder / "result.json", failed.to_json())
        return 1
    return 0


def end_with_parent(parent: int) -> None:
    """End this process when `parent` ends. On Linux the kernel kills it at once, whatever it is
    doing; elsewhere it ends when stdin closes and Python next runs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # gone before the kernel was asked
            os._exit(ORPHANED)
    threading.Thread(target=_end_with_stdin, daemon=True).start()


class _Events:
    """Lines of JSON; of steps no more than five a second."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.last = stream, 0.0

    def __call__(self, kind: str, **values: Any) -> None:
        now = time.monotonic()
        if kind == "step":
            if now - self.last < 0.2:
                return
            self.last = now
        try:
            self.stream.write(json.dumps({"kind": kind, **values}) + "\n")
        except BrokenPipeError:  # the sweep is gone: stop as if killed, which fails nothing
            os._exit(ORPHANED)


def _end_with_stdin() -> None:
    # Not sys.stdin, whose lock a thread must not hold when the interpreter ends.
    while os.read(0, 1):
        pass
    os._exit(ORPHANED)
