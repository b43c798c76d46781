"""Lock a folder for one process."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK = ".lock"
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock `folder` for this process. The lock is released when the process ends, even if killed.

    Nothing is written to the lock file, and no link is followed.

    Raises: ValueError if another process has the lock; `what` names it in the message. ValueError
    if the lock is a link or no ordinary file.
    """
    busy = f"Another {what} is running in {folder}. Wait until it ends, or choose another folder."
    with _opened(folder / LOCK, os.O_RDWR | os.O_CREAT | _NO_WAIT, stat.S_ISREG) as handle:
        _hold(handle, busy)
        yield


@contextlib.contextmanager
def held(folder: Path, busy: str) -> Iterator[None]:
    """Lock the folder without a lock file. It is made if missing, and removed if empty afterwards.

    Raises: ValueError with the message `busy` if another process has the lock; ValueError for a
    link.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            _hold(stack.enter_context(_opened(folder, os.O_RDONLY, stat.S_ISDIR)), busy)
        yield
    with contextlib.suppress(OSError):
        folder.rmdir()


@contextlib.contextmanager
def _opened(path: Path, flags: int, is_right: Callable[[int], bool]) -> Iterator[int]:
    """Open without following a link, and close at the end.

    Raises: ValueError for a link, or for another kind of file than `is_right` accepts.
    """
    wrong = f"{path} is a link, or not of the kind that a lock needs; remove it."
    try:
        handle = os.open(path, flags | _NO_LINK, 0o666)
    except OSError as error:
        if os.path.lexists(path) and not is_right(path.lstat().st_mode):
            raise ValueError(wrong) from error
        raise
    try:
        if not is_right(os.fstat(handle).st_mode):
            raise ValueError(wrong)
        yield handle
    finally:
        os.close(handle)


def _hold(handle: int, busy: str) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(busy) from None
