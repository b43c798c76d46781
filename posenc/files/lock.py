"""Lock a folder for one process."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from posenc.files.opening import make_folder, open_handle, remove_empty_folders

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK_NAME = ".lock"
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NOT_LOCKABLE_MESSAGE = "it is a link, or not of the kind that a lock needs; remove it."


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Lock `folder` for this process. The lock is released when the process ends, even if killed.

    Nothing is written to the lock file, and no link is followed.

    what: the command that locks the folder, such as "posenc compare", for the message.
    Raises: ValueError if another process has the lock, or if the lock is a link or no ordinary
    file.
    """
    busy = f"Another {what} is running in {folder}. Wait until it ends, or choose another folder."
    handle = open_handle(
        folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | _O_NOFOLLOW, refusal=_NOT_LOCKABLE_MESSAGE
    )
    try:
        _lock_until_closed(handle, busy)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked_without_file(folder: Path, busy: str) -> Iterator[None]:
    """Lock the folder for this process, without a lock file. The folder is made if it is missing,
    and removed if it is empty afterwards. Windows, which has no such locks, locks nothing.

    Raises: ValueError if another process has the lock, with the message `busy`, or for a link.
    """
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        if fcntl is not None:
            handle = open_handle(
                folder, os.O_RDONLY | _O_NOFOLLOW, stat.S_ISDIR, _NOT_LOCKABLE_MESSAGE
            )
            stack.callback(os.close, handle)
            _lock_until_closed(handle, busy)
        stack.callback(remove_empty_folders, [folder])
        yield


def _lock_until_closed(handle: int, busy: str) -> None:
    """Lock the open file until it is closed; Windows, which has no fcntl, locks nothing. Raises:
    ValueError with the message `busy` if another process has the lock."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(busy) from None
