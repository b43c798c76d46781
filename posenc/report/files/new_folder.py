"""Make a new folder completely or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from posenc.report.files.lock import held

_UNPROVED = ".unproved"


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
            out.parent.mkdir(parents=True, exist_ok=True)
            for left in out.parent.glob(f".{glob.escape(out.name)}.*{_UNPROVED}"):
                if _is_own_folder(left):
                    with held(left, busy):
                        shutil.rmtree(left)
            temporary = out.parent / f".{out.name}.{secrets.token_hex(8)}{_UNPROVED}"
            temporary.mkdir()
            stack.enter_context(held(temporary, busy))
        except OSError as error:
            raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        yield temporary
        _to_disk(temporary)
        try:
            temporary.rename(out)
        except OSError as error:
            raise ValueError(f"{out} was made by another process meanwhile.") from error


def missing(folder: Path) -> list[Path]:
    """Return those of the folder and its parents that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove these folders, except those that are not empty."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()


def _is_own_folder(path: Path) -> bool:
    """Return True for a folder of this user, False for a link."""
    found = path.lstat()
    own = getattr(os, "geteuid", lambda: found.st_uid)()  # Windows has no such numbers
    return stat.S_ISDIR(found.st_mode) and found.st_uid == own


def _to_disk(folder: Path) -> None:
    """Flush everything to disk before the folder gets its name."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
