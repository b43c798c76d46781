"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such lock on Windows
    fcntl = None

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock `folder` for this process. The lock is released when the process ends, however it ends.

    Raises: ValueError if another process holds the lock; `what` is the name of such a process.
    """
    busy = f"Another {what} is running in {folder}. Wait until it ends, or choose another folder."
    with (folder / LOCK).open("w", encoding="utf-8") as file:
        _hold(file.fileno(), busy)
        yield


@contextlib.contextmanager
def held(folder: Path, busy: str) -> Iterator[None]:
    """Hold the folder itself, so that no lock file stays in it. It is made if need be, and gone
    afterwards if it is empty.

    Raises: ValueError where another process holds it; `busy` is what to say then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            _hold(handle, busy)
        yield
    with contextlib.suppress(OSError):
        folder.rmdir()


def _hold(handle: int, busy: str) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(busy) from None
