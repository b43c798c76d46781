"""Write files completely or not at all."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

_PARTIAL = re.compile(r"\..+\.\d+\.partial")


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A partial file beside `path` to write; on the disk and in its place when the block ends
    without an error, deleted otherwise."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `path` so that a crash at any moment leaves the old content or the new.

    Text becomes UTF-8; lone surrogates become question marks. A kill in the middle leaves a partial
    file next to `path`; `remove_partials` deletes it.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    with atomically(Path(path)) as partial:
        partial.write_bytes(data)


def is_partial(path: Path) -> bool:
    """Whether `path` has the name of a file that a killed `write_atomically` leaves."""
    return _PARTIAL.fullmatch(path.name) is not None


def remove_partials(folder: Path) -> None:
    """Delete the partial files that killed writes left in `folder` and below.

    Call it only while no other process writes there, that is, while holding the folder's lock.
    """
    for path in list(_files_below(folder)):
        if is_partial(path):
            path.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Check before long work that its result can be written to `path`; makes the folders above it.

    Raises: OSError.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it.")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a pipe or a device, not an ordinary file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        probe.touch()
    finally:
        probe.unlink(missing_ok=True)


def check_figures(folder: str | Path | None) -> None:
    """Check before anything is measured that figures can be written into `folder`, and make it;
    None: none were asked for.

    Raises: ValueError, OSError.
    """
    if folder is None:
        return
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--figures: {folder} is not a folder.")
    try:
        check_writable(folder / "figure.csv")
    except OSError as error:
        raise ValueError(f"--figures: cannot write into {folder} ({error.strerror}).") from error


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)
