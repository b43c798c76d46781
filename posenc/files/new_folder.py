"""Make a new folder completely or not at all."""

import contextlib
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from posenc.files.lock import locked_without_file
from posenc.files.opening import is_own_folder, make_folder, remove_folder

UNPROVED_SUFFIX = ".unproved"
"""Ends the name of a folder until everything in it has been written."""
ON_WINDOWS = os.name == "nt"


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends without an error.

    Its name cannot be predicted. What a killed run left of `out` is removed; links are neither
    followed nor removed.

    Raises: ValueError if `out` exists, its parent is not writable, or another process writes it.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} exists already; give a new folder.")
    busy = f"Another posenc writes {out}. Wait for it, or give another --out."
    with contextlib.ExitStack() as stack:
        try:
            make_folder(out.parent)
            for leftover in out.parent.glob(f".{glob.escape(out.name)}.*{UNPROVED_SUFFIX}"):
                if is_own_folder(leftover):
                    # Refused while another process still writes it.
                    with locked_without_file(leftover, busy):
                        shutil.rmtree(leftover)
            temporary = out.parent / f".{out.name}.{secrets.token_hex(8)}{UNPROVED_SUFFIX}"
            temporary.mkdir()
            stack.enter_context(locked_without_file(temporary, busy))
        except OSError as error:
            raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error
        stack.callback(remove_folder, temporary)
        try:
            yield temporary
        except OSError as error:
            if error.filename is not None:  # name the folder that the user gave
                error.filename = str(error.filename).replace(temporary.name, out.name)
            raise
        _flush_to_disk(temporary)
        try:
            temporary.rename(out)
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
