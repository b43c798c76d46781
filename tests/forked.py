"""Trials in forks of this process, which has loaded torch: a process of their own, as users have,
takes four seconds to begin."""

import importlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from posenc.compare.plan import time_estimate
from posenc.compare.trial import process


class Fork:
    """The part of subprocess.Popen that a trial's process needs."""

    def __init__(self, command: Sequence[str], *, stderr: io.TextIOBase, **others: object) -> None:
        (out, said), (held, holds) = os.pipe(), os.pipe()
        with warnings.catch_warnings(action="ignore"):  # this process may have threads
            self.pid = os.fork()
        if not self.pid:
            for mine, there in ((held, 0), (said, 1), (stderr.fileno(), 2)):
                os.dup2(mine, there)
            for end in (out, said, held, holds):
                os.close(end)
            if not _computes_gradients():
                os.execv(command[0], command)
            _run(*command[command.index("-c") + 3 :])
        os.close(said)
        os.close(held)
        self.stdout = os.fdopen(out, encoding="utf-8")
        self.stdin = os.fdopen(holds, "w", encoding="utf-8")
        self.returncode: int | None = None

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def __enter__(self) -> "Fork":
        return self

    def __exit__(self, *exception: object) -> None:
        self.stdout.close()
        self.stdin.close()
        self.wait()


def _computes_gradients() -> bool:
    """Return False in a fork of a process in which autograd has threads of its own, as nested
    backward passes begin them."""
    try:
        torch.ones(1, requires_grad=True).sum().backward()
    except RuntimeError:
        return False
    return True


def _run(module: str, *arguments: str) -> None:
    """Do what the command would do, and end."""
    code = 1
    try:
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
        torch.set_num_threads(1)  # those of the parent are not here
        code = importlib.import_module(module).main(*arguments)
    finally:
        os._exit(code)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork where posenc starts a process for a trial, or for measuring one."""
    for module in (process, time_estimate):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Fork, PIPE=-1))
