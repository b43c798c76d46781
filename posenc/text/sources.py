"""Where text comes from: files, folders, globs, or the source that every Python carries."""

from __future__ import annotations

import glob
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True)
class Source:
    """The files of a text, with the names under which they are hashed."""

    name: str
    files: tuple[tuple[str, Path], ...]


def embedded() -> Source:
    """The standard library's source of the Python that runs this, without its tests, which not
    every installation has."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        (path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not _SKIPPED.intersection(path.relative_to(root).parts)
    ]
    if not files:
        raise ValueError(f"No Python source in {root}. Give a text of your own with --text.")
    return Source(f"Python {platform.python_version()} standard library", tuple(sorted(files)))


def find_text(texts: Sequence[str]) -> Source:
    """The files that `texts` name: files, folders (with all that is in them but hidden files) and
    globs.

    Raises: ValueError where one of them names no file.
    """
    found: dict[Path, None] = {}
    for text in texts:
        # glob.glob, since Path.glob takes no absolute pattern.
        matches = [text] if Path(text).exists() else glob.glob(text, recursive=True)  # noqa: PTH207
        files = [f for match in sorted(matches) for f in _files_below(Path(match))]
        if not files:
            what = "No file in the folder" if Path(text).is_dir() else "No such file"
            raise ValueError(f"{what}: {text}. --text takes files, folders and globs.")
        found.update((f.resolve(), None) for f in files)
    root = Path(os.path.commonpath([path.parent for path in found]))
    named = sorted((path.relative_to(root).as_posix(), path) for path in found)
    name = ", ".join(Path(text).name or text for text in texts)
    return Source(name, tuple(named))


def _files_below(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return [
        file
        for file in sorted(path.rglob("*"))
        if file.is_file()
        and not any(
            part.startswith(".") or part == "__pycache__" for part in file.relative_to(path).parts
        )
    ]
