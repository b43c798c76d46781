"""Lock a folder for one process, and make a new folder completely or not at all."""

import contextlib
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from posenc.files.opening import (
    is_own_folder,
    make_folder,
    open_handle,
    remove_empty_folders,
    remove_folder,
)

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

LOCK_NAME = ".lock"
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NOT_LOCKABLE_MESSAGE = "it is a link, or not of the kind that a lock needs; remove it."
UNPROVED_SUFFIX = ".unproved"
"""Ends the name of a new folder until everything in it has been written."""
ON_WINDOWS = os.name == "nt"


@contextlib.contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Lock `folder` for this process. The lock is released when the process ends, even if killed.

    Nothing is written to the lock file, and no link is followed.

    command: what locks the folder, such as "posenc compare", for the message.
    Raises: ValueError if another process has the lock, or if the lock is a link or no ordinary
    file.
    """
    busy_message = (
        f"Another {command} is running in {folder}. Wait until it ends, or choose another folder."
    )
    handle = open_handle(
        folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | _O_NOFOLLOW, refusal=_NOT_LOCKABLE_MESSAGE
    )
    try:
        _lock_until_closed(handle, busy_message)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked_without_file(folder: Path, busy_message: str) -> Iterator[None]:
    """Lock the folder for this process, without a lock file. The folder is made if it is missing,
    and removed if it is empty afterwards. Windows, which has no such locks, locks nothing.

    Raises: ValueError if another process has the lock, with the message `busy_message`, or for a
    link.
    """
    make_folder(folder)
    with contextlib.ExitStack() as exit_stack:
        if fcntl is not None:
            handle = open_handle(
                folder, os.O_RDONLY | _O_NOFOLLOW, stat.S_ISDIR, _NOT_LOCKABLE_MESSAGE
            )
            exit_stack.callback(os.close, handle)
            _lock_until_closed(handle, busy_message)
        exit_stack.callback(remove_empty_folders, [folder])
        yield


def _lock_until_closed(handle: int, busy_message: str) -> None:
    """Lock the open file until it is closed; Windows, which has no fcntl, locks nothing. Raises:
    ValueError with the message `busy_message` if another process has the lock."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(busy_message) from None


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends without an error.

    Its name cannot be predicted. What a killed run left of `out` is removed; links are neither
    followed nor removed.

    Raises: ValueError if `out` exists, its parent is not writable, or another process writes it.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already; give a new folder.")
    busy_message = f"Another posenc writes {out}. Wait for it, or give another --out."
    with contextlib.ExitStack() as exit_stack:
        try:
            make_folder(out.parent)
            for leftover in out.parent.glob(f".{glob.escape(out.name)}.*{UNPROVED_SUFFIX}"):
                if is_own_folder(leftover):
                    # Refused while another process still writes it.
                    with locked_without_file(leftover, busy_message):
                        shutil.rmtree(leftover)
            temporary_folder = out.parent / f".{out.name}.{secrets.token_hex(8)}{UNPROVED_SUFFIX}"
            temporary_folder.mkdir()
            exit_stack.enter_context(locked_without_file(temporary_folder, busy_message))
        except OSError as error:
            raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error
        exit_stack.callback(remove_folder, temporary_folder)
        try:
            yield temporary_folder
        except OSError as error:
            if error.filename is not None:  # name the folder that the user gave
                error.filename = str(error.filename).replace(temporary_folder.name, out.name)
            raise
        _flush_to_disk(temporary_folder)
        try:
            temporary_folder.rename(out)
        except OSError as error:
            if not os.path.lexists(out):
                raise
            raise ValueError(f"{out} was made by another process meanwhile.") from error


def _flush_to_disk(folder: Path) -> None:
    """Flush a folder and everything in it to disk, so that after a crash no file of it is empty."""
    access = os.O_RDONLY
    if ON_WINDOWS:
        access = os.O_RDWR  # Windows flushes only files that may be written
    for path in (*folder.rglob("*"), folder):
        if ON_WINDOWS and path.is_dir():
            continue  # Windows opens no folders
        handle = os.open(path, access)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
