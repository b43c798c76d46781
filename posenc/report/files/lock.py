"""Lock a folder for one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock `folder` for this process. The lock is released when the process ends, even if killed.

    Raises: ValueError if another process has the lock; `what` names it in the message.
    """
    busy = f"Another {what} is running in {folder}. Wait until it ends, or choose another folder."
    with (folder / LOCK).open("w", encoding="utf-8") as file:
        _hold(file.fileno(), busy)
        yield


@contextlib.contextmanager
def held(folder: Path, busy: str) -> Iterator[None]:
    """Lock the folder without a lock file. It is made if missing, and removed if empty afterwards.

    Raises: ValueError with the message `busy` if another process has the lock.
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
