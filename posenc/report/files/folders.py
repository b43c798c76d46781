"""Make and delete folders without following a link."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make a folder that the user names, with those above it. A link to a folder is followed."""
    folder.mkdir(parents=True, exist_ok=True)


def make_inside(folder: Path) -> Path:
    """Make a folder inside of one of ours, if it is missing, and return it.

    Raises: ValueError for a link or a file of this name; OSError where the folder above has gone.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise ValueError(f"{folder}: a link, or not a folder; remove it.") from None
    return folder


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user can read and write, if it is missing, and return it.

    Raises: OSError for a link, a folder of another user, or one that others can write.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_own_folder(folder) or folder.lstat().st_mode & 0o022:
        raise OSError(f"{folder} belongs to somebody else, or others can write there.")
    return folder


def beside(folder: Path, name: object) -> Path:
    """Return the path of a file of the folder. Raises: ValueError for a name that leads out."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of {folder}")
    return folder / name


def remove_folder(folder: Path) -> None:
    """Delete a folder and all in it, as far as possible. What is no folder stays: a link, and what
    it names, and a pipe, for which shutil would wait."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(folder.lstat().st_mode):
            shutil.rmtree(folder, ignore_errors=True)


def is_own_folder(path: Path) -> bool:
    """Return True for a folder of this user, False for a link."""
    found = path.lstat()
    own = getattr(os, "geteuid", lambda: found.st_uid)()  # Windows has no such numbers
    return stat.S_ISDIR(found.st_mode) and found.st_uid == own
