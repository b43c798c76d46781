"""Write files completely or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{16}\.partial")


def _new_partial(path: Path) -> Path:
    """Make an empty file next to `path`; its name cannot be predicted, and no link is followed."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    partial.touch(exist_ok=False)
    return partial


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yield a partial file next to `path`. At the end of the block it is flushed to disk and
    replaces `path`; after an error it is deleted."""
    partial = _new_partial(path)
    try:
        yield partial
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `path` so that a crash leaves either the old content or the new.

    Text is written as UTF-8, lone surrogates as question marks. A killed process leaves a partial
    file next to `path`, which `remove_partials` deletes.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    with atomically(Path(path)) as partial:
        partial.write_bytes(data)


def is_partial(path: Path) -> bool:
    """Return True if `path` has the name of a file left by a killed `write_atomically`."""
    return _PARTIAL.fullmatch(path.name) is not None


def remove_partials(folder: Path) -> None:
    """Delete the partial files that killed writes left in `folder` and below.

    Call it only while holding the folder's lock, so that no other process writes there.
    """
    for path in list(_files_below(folder)):
        if is_partial(path):
            path.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Make the folders of `path` and check that it can be written, before work begins.

    Raises: OSError.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it.")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a pipe or a device, not an ordinary file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    _new_partial(path).unlink()


def check_figures(folder: str | Path | None) -> None:
    """Make `folder` and check that figures can be written there, before work begins; None: no
    figures.

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
