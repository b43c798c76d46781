"""One process at a time in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"


@contextlib.contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder` for this process; the lock ends with the process, however it ends.

    Raises: ValueError where another process holds it; `what` says what that process is.
    """
    try:
        import fcntl
    except ImportError:  # no such lock on Windows
        yield
        return
    with (folder / LOCK).open("w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"Another {what} is running in {folder}. Wait until it ends, or choose another "
                "folder."
            ) from None
        yield
