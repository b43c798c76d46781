"""Write files completely or not at all."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from posenc.files.opening import (
    NOT_ORDINARY_MESSAGE,
    make_folder,
    name_path_in_os_errors,
    read_file_bytes,
)

_PARTIAL_NAME = re.compile(r"\..+\.[0-9a-f]{16}\.partial")
_HAS_FOLDER_HANDLES = os.rename in os.supports_dir_fd
"""True where a file can be named relative to an open folder; False on Windows, where each call
resolves the whole path again."""


@contextlib.contextmanager
def _open_folder_of(path: Path) -> Iterator[int | None]:
    """Yield a handle of the file's folder, so that no other folder can take its place meanwhile;
    None on Windows, which has no such handles."""
    if not _HAS_FOLDER_HANDLES:
        yield None
        return
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _open_partial_file(path: Path, *, replace: bool = True) -> Iterator[tuple[BinaryIO, Path]]:
    """Yield a new file next to `path`, open for writing, and its name, which cannot be predicted.

    replace: True: at the end of the `with` the file is flushed to disk and takes the place of
        `path`. False: it is deleted; a caller does so to find out whether `path` can be written.
    After an error the file is deleted in both cases.

    Raises: OSError that names `path`, also where something else has the name of the new file by
    then, or `path` is a pipe, a device or a folder.
    """
    partial_path = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    partial_name, final_name = (
        (partial_path.name, path.name) if _HAS_FOLDER_HANDLES else (partial_path, path)
    )
    with (
        name_path_in_os_errors(path, partial_name, str(partial_path)),
        _open_folder_of(path) as folder_handle,
    ):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        flags |= getattr(os, "O_BINARY", 0)  # or Windows would write \n as \r\n
        # A link may be replaced, but not a device, a pipe or a folder: none of them could be
        # restored.
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(final_name, dir_fd=folder_handle, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise FileExistsError(f"{path}: {NOT_ORDINARY_MESSAGE}")
        handle = os.open(
            partial_name, flags, 0o666, dir_fd=folder_handle
        )  # as the user's umask allows
        try:
            with os.fdopen(handle, "wb") as file:
                yield file, partial_path
                file.flush()
                os.fsync(handle)
                # Another process may have put a file of its own in the place of this one.
                named_status = os.stat(partial_name, dir_fd=folder_handle, follow_symlinks=False)
                if not os.path.samestat(named_status, os.fstat(handle)):
                    raise OSError(f"{partial_path} was exchanged while it was written.")
            if replace:
                os.replace(
                    partial_name, final_name, src_dir_fd=folder_handle, dst_dir_fd=folder_handle
                )
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial_name, dir_fd=folder_handle)


@contextlib.contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Yield the name of a partial file next to `path`. At the end of the block it is flushed to
    disk and replaces `path`; after an error it is deleted."""
    with _open_partial_file(path) as (_, partial_path):
        yield partial_path


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `path` so that a crash leaves either the old content or the new. A link of this name is
    replaced, and what it names stays.

    Text is written as UTF-8, lone surrogates as question marks. A killed process leaves a partial
    file next to `path`, which `remove_partials` deletes.
    """
    data = content.encode(errors="replace") if isinstance(content, str) else content
    write_pieces_atomically(Path(path), [data])


def write_pieces_atomically(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces of a content one after the other, as `write_atomically` does the whole."""
    with _open_partial_file(path) as (file, _):
        for piece in pieces:
            file.write(piece)


def is_partial(path: Path) -> bool:
    """Return True if `path` has the name of a file left by a killed `write_atomically`."""
    return _PARTIAL_NAME.fullmatch(path.name) is not None


def remove_partials(folder: Path) -> None:
    """Delete the partial files that killed writes left in `folder` and below.

    Call it only while holding the folder's lock, so that no other process writes there.
    """
    for parent, _, names in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            if is_partial(path):
                path.unlink(missing_ok=True)


def prepare_file(path: Path) -> None:
    """Make the folders above `path` and check that the file can be written, before work begins. An
    existing file is not changed.

    Raises: OSError if it cannot be written.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it.")
    make_folder(path.parent)
    with _open_partial_file(path, replace=False):
        pass


def prepare_page(path: Path, mark: str = '<meta name="generator" content="posenc">') -> None:
    """Make the folders of a page and check that it can be written, before work begins.

    mark: text that every page of this command contains.
    Raises: OSError; ValueError if `path` is a file that is neither empty nor a page with `mark`,
    and would be lost.
    """
    if path.is_file() and (content := read_file_bytes(path)):
        if not (content.startswith(b"<!doctype html>") and mark.encode() in content):
            raise ValueError(f"{path} exists already and is no page of this command; name another.")
    prepare_file(path)


def prepare_results(path: Path, mark: str) -> None:
    """Make the folders of a file of results and check that it can be written, before work begins.

    mark: text with which all results of this command begin.
    Raises: OSError; ValueError if `path` is a file that is neither empty nor begins with `mark`,
    and would be lost.
    """
    if (
        path.is_file()
        and (content := read_file_bytes(path))
        and not content.startswith(mark.encode())
    ):
        raise ValueError(
            f"{path} exists already and holds no results of this command; name another."
        )
    prepare_file(path)


def prepare_page_and_figures(
    figures_folder: str | Path | None,
    page_path: str | Path | None = None,
    tables_folder: Path | None = None,
) -> None:
    """Make the folders of figures, of a page and of tables, and check that each can be written,
    before work begins. None for one that is not asked for.

    Raises: ValueError, OSError.
    """
    if figures_folder is not None:
        prepare_figures_folder(Path(figures_folder))
    if tables_folder is not None:
        prepare_figures_folder(tables_folder, "--tables")
    if page_path is not None:
        prepare_page(Path(page_path))


FIGURES_MARKER = "posenc-figures.txt"
"""Name of the file that marks a folder of figures as posenc's, so that posenc may replace them."""


def prepare_figures_folder(folder: Path, option: str = "--figures") -> None:
    """Make a folder of figures or tables and check that it can be written, before work begins.

    option: which names the folder.
    Raises: ValueError, also for a folder with files that posenc did not write: a figure could have
    the name of one of them.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option}: {folder} is not a folder.")
    try:
        other_names = [path.name for path in sorted(folder.iterdir())] if folder.exists() else []
        if other_names and FIGURES_MARKER not in other_names:
            kind = option.removeprefix("--")
            raise ValueError(
                f"{option}: {folder} holds other files ({other_names[0]}), which {kind} might "
                f"replace. Name a new folder, or one that posenc has written {kind} to."
            )
        prepare_file(folder / "figure.csv")
    except OSError as error:
        raise ValueError(f"{option}: cannot write into {folder} ({error.strerror}).") from error


def mark_figures(folder: Path) -> None:
    """Write the file FIGURES_MARKER into a folder, so that a later run may replace the figures
    there."""
    text = "posenc writes figures and their numbers here, and replaces files of the same name.\n"
    write_atomically(folder / FIGURES_MARKER, text)
