"""A process that works for a comparison: how it is started, and how it ends with the one that
started it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

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
