"""Make a new folder completely or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from posenc.report.files.lock import held


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` when the block ends without an error.

    Its name depends on `out` only, so the next run removes what a killed run leaves.

    Raises: ValueError if `out` exists, its parent is not writable, or another process writes it.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; give a new folder.")
    temporary = out.parent / f".{out.name}.unproved"
    with contextlib.ExitStack() as stack:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            busy = f"Another posenc writes {out}. Wait for it, or give another --out."
            stack.enter_context(held(temporary, busy))
            for path in temporary.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError as error:
            raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error
        stack.callback(shutil.rmtree, temporary, ignore_errors=True)
        yield temporary
        _to_disk(temporary)
        temporary.replace(out)


def _to_disk(folder: Path) -> None:
    """Flush everything to disk before the folder gets its name."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
