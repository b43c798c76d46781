"""Find text files by name, folder or glob, or in Python's standard library."""

import glob
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from posenc.files.atomic import FIGURES_MARKER
from posenc.files.opening import open_ordinary

STUDY_FILE = "study.json"
"""File of a comparison that says what was compared."""
STUDY_MARK = b'"format": "posenc study '
"""Text near the beginning of that file, which its version follows."""
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
MAX_FILES = 1_000_000
"""Maximum number of files that the values of an option may name."""


@dataclass(frozen=True)
class TextSource:
    """The files of a text.

    name: words for the text, such as "Python 3.13.1 standard library".
    files: pairs of the name under which a file is hashed, and its path.
    """

    name: str
    files: tuple[tuple[str, Path], ...]


def standard_library_text() -> TextSource:
    """Return the source files of the running Python's standard library, without its tests, which
    some installations lack."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        (path.relative_to(root).as_posix(), path)
        for path in _files_below(root, _SKIPPED_FOLDERS)
        if path.suffix == ".py"
    ]
    if not files:
        raise ValueError(f"No Python source in {root}. Give your own text with --text.")
    return TextSource(f"Python {platform.python_version()} standard library", tuple(sorted(files)))


def find_text(patterns: Sequence[str], option: str = "--text") -> TextSource:
    """Return the files that `patterns`, the values of an option such as --text, name: files,
    folders (without hidden files) and globs.

    Folders and globs leave out files that comparisons wrote, so that the same command reads the
    same text after its first run.

    Raises: ValueError for a value that names no file, or a pipe or a device, and for more than
    `MAX_FILES` files.
    """
    # Since the last call a comparison may have begun, or been deleted.
    _is_comparison_folder.cache_clear()
    paths: dict[Path, None] = {}  # without repeats, in the order in which they are named
    num_found = 0
    for pattern in patterns:
        count_before = num_found
        for file in _iterate_named_files(pattern):
            num_found += 1
            if num_found > MAX_FILES:
                raise ValueError(
                    f"{option}: more than {MAX_FILES:,} files, the last in {pattern}. Join them "
                    "into fewer."
                )
            paths[file.resolve()] = None
        if num_found == count_before:
            raise ValueError(
                f"{_why_no_file(pattern)}: {pattern}. {option} takes files, folders and globs."
            )
    root = Path(os.path.commonpath([path.parent for path in paths]))
    names_and_paths = sorted(
        (_decode_as_utf8(path.relative_to(root).as_posix()), path) for path in paths
    )
    name = ", ".join(_decode_as_utf8(Path(pattern).name or pattern) for pattern in patterns)
    return TextSource(name, tuple(names_and_paths))


def _why_no_file(pattern: str) -> str:
    """Return the beginning of a sentence that says why one value of --text names no file: "No such
    file"."""
    if Path(pattern).is_dir():
        return "No file in the folder, apart from hidden ones and comparisons of posenc"
    is_glob = glob.escape(pattern) != pattern
    return "No file has a name like" if is_glob else "No such file"


def _iterate_named_files(pattern: str) -> Iterator[Path]:
    """Yield the ordinary files that one value of --text names."""
    path = Path(pattern)
    if path.is_file():
        yield path
    elif path.is_dir():
        yield from _files_below(path)
    elif path.exists():
        raise ValueError(
            f"{pattern} is a pipe or a device, not an ordinary file. Copy the text into a file "
            "first."
        )
    else:
        # glob.iglob, because Path.glob refuses absolute patterns.
        for matched_path in map(Path, glob.iglob(pattern, recursive=True)):  # noqa: PTH207
            if any(map(_is_comparison_folder, matched_path.parents)):
                continue
            if matched_path.is_dir():
                yield from _files_below(matched_path)
            elif matched_path.is_file():
                yield matched_path


def _files_below(
    folder: Path, skipped_names: Set[str] = frozenset({"__pycache__"})
) -> Iterator[Path]:
    """Yield the ordinary files in a folder, except hidden ones, skipped names and comparisons."""
    for parent, folders, files in os.walk(folder):
        if _is_comparison_folder(Path(parent)):
            folders.clear()
            continue
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name not in skipped_names
        )
        for name in sorted(files):
            file = Path(parent, name)
            if name[0] != "." and name not in skipped_names and file.is_file():
                yield file


@cache
def _is_comparison_folder(folder: Path) -> bool:
    """Return True for a folder of a comparison or of its figures."""
    if (folder / FIGURES_MARKER).is_file():
        return True
    study_file = folder / STUDY_FILE
    if not study_file.is_file():
        return False
    with open_ordinary(study_file) as file:
        return STUDY_MARK in file.read(1000)


def _decode_as_utf8(name: str) -> str:
    """Decode a file name as UTF-8, whatever the locale."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")
