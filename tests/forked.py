"""Trials, and probes of transformers, in forks of this process, which has loaded what they need: a
process of their own, as users have, takes four seconds to begin."""

import importlib
import io
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from posenc.compare.plan import time_estimate
from posenc.compare.trial import process
from posenc.runtimes.ask import interpreters


class Fork:
    """The part of subprocess.Popen that a trial's process needs."""

    def __init__(self, command: Sequence[str], *, stderr: io.TextIOBase, **others: object) -> None:
        # What every trial loads is loaded once here, and not in each fork.
        import torch._dynamo  # noqa: F401 - the first optimizer of a process would

        from posenc.compare.trial import run_trial  # noqa: F401

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


class ForkedProbe:
    """The part of subprocess.Popen that asking transformers needs."""

    def __init__(
        self,
        command: Sequence[Path],
        *,
        stdout: io.BufferedIOBase,
        stderr: io.BufferedIOBase,
        cwd: Path,
        env: Mapping[str, str],
    ) -> None:
        # What nearly every probe loads is loaded once here, and not in each fork.
        import transformers.models.llama.modeling_llama  # noqa: F401

        self.returncode: int | None = None
        question, self._question = os.pipe()
        with warnings.catch_warnings(action="ignore"):  # this process may have threads
            self.pid = os.fork()
        if self.pid:
            os.close(question)
            return
        os.close(self._question)
        os.setsid()
        os.chdir(cwd)
        os.environ.update(env)
        for mine, there in ((question, 0), (stdout.fileno(), 1), (stderr.fileno(), 2)):
            os.dup2(mine, there)
        _run_file(command[1])

    def communicate(self, question: bytes, timeout: float) -> None:
        """Write the question and wait for the end. A fork lacks the threads of this process, and
        may wait for one of them without end."""
        with os.fdopen(self._question, "wb") as pipe:
            pipe.write(question)
        end = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked probe", timeout)
            else:
                time.sleep(0.005)

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _run_file(file: Path) -> None:
    """Run a Python file with the standard streams of this process, and end."""
    code = 1
    sys.stdin = os.fdopen(0, encoding="utf-8")
    out = sys.stdout = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8")
    sys.path.insert(0, str(file.parent))  # as of a program that is run
    sys.modules.pop("probing", None)
    try:
        runpy.run_path(str(file), run_name="__main__")
        out.flush()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


def start_probe(
    command: Sequence[Path], *, stdin: int, start_new_session: bool, **others: Any
) -> ForkedProbe | subprocess.Popen:
    """Fork where the interpreter is the one that runs the tests; start any other."""
    if command[0] == Path(sys.executable).absolute():
        return ForkedProbe(command, **others)
    return subprocess.Popen([*command], stdin=stdin, start_new_session=start_new_session, **others)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork where posenc starts a process for a trial, for measuring one, or for a probe."""
    for module in (process, time_estimate):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(Popen=Fork, PIPE=-1))
    probes = SimpleNamespace(
        Popen=start_probe, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(interpreters, "subprocess", probes)
