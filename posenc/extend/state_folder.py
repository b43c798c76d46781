"""Lock the folder that keeps finished work of killed runs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from posenc.files.folders import locked_without_file

PARTIAL_FILE_PATTERNS = (".search.json.*.partial", "tune/.tune*.partial")
"""Files that a kill during a write leaves behind."""


def default_state_folder(out: Path) -> Path:
    """Return the folder next to `out` in which search and tuning save their work for restarts,
    unless --state names another. It is deleted after the export."""
    return out.parent / f".{out.name}.state"


@contextlib.contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this run. It is made if missing, and removed if empty afterwards. Partial
    files of killed runs are deleted. The lock ends with the process, even if killed.

    Raises: ValueError if another run has locked it.
    """
    busy_message = (
        f"Another posenc extend works in {folder}. Wait for it, or give another --state or --out."
    )
    with locked_without_file(folder, busy_message):
        for partial_file in (
            path for pattern in PARTIAL_FILE_PATTERNS for path in folder.glob(pattern)
        ):
            partial_file.unlink(missing_ok=True)
        yield
