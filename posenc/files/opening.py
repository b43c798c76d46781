"""Open files and make folders without following a link; no other module does so by itself."""

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TextIO

LARGEST_TEXT_BYTES = 64 << 20
"""Bytes of the largest file that is read as one text: a study of a thousand trials has 20 MB."""
NOT_ORDINARY_MESSAGE = "not an ordinary file, but a pipe, a device or a folder."
FICLONE = 0x40049409
"""Linux's FICLONE: the copy shares the original's blocks until one of them is written."""
PIECE_BYTES = 1 << 24
"""Bytes that are copied at a time, so that a large file needs little memory: 16 MiB, chosen."""
_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
# A pipe is not waited for, no terminal is taken over, no child inherits the handle.
_FLAGS_OF_EVERY_OPEN = sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY")
)


def open_handle(
    path: Path,
    flags: int,
    accepts_mode: Callable[[int], bool] = stat.S_ISREG,
    refusal: str = NOT_ORDINARY_MESSAGE,
) -> int:
    """Open a file and return its handle, a number. With O_NOFOLLOW in `flags` a link is refused.

    Args:
        flags: those of os.open.
        accepts_mode: returns True for the mode (st_mode) of a file that may be opened.
        refusal: what the message says of any other file.

    Raises: ValueError with the path and `refusal`; OSError where it cannot be opened.
    """
    try:
        handle = os.open(path, flags | _FLAGS_OF_EVERY_OPEN, 0o666)  # as the umask allows
    except OSError as error:
        # A link or a folder, for instance, fails with an error that does not say what is wrong.
        with contextlib.suppress(OSError):
            mode = Path(path).stat(follow_symlinks=not flags & _O_NOFOLLOW).st_mode
            if not accepts_mode(mode):
                raise ValueError(f"{path}: {refusal}") from error
        raise
    if accepts_mode(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise ValueError(f"{path}: {refusal}")


@contextlib.contextmanager
def name_path_in_os_errors(path: Path, *hidden_names: object) -> Iterator[None]:
    """Inside the `with`, raise each OSError again as one that names `path`, if it names no file or
    one of `hidden_names`: files that are made in passing, which the user does not know. An OSError
    that names another file, or has no errno, is not changed."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, *hidden_names):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def open_ordinary(path: Path, *, follow_links: bool = True) -> BinaryIO:
    """Open an ordinary file for reading, or a link to one unless `follow_links` is false.

    Raises: ValueError for a pipe, which would be waited for, and a device, which has no end.
    """
    return os.fdopen(open_handle(path, os.O_RDONLY | (0 if follow_links else _O_NOFOLLOW)), "rb")


def read_file_bytes(path: Path, max_bytes: int | None = LARGEST_TEXT_BYTES) -> bytes:
    """Return the content of an ordinary file, or of a link to one, as bytes.

    max_bytes: most bytes that are read; None: any number.
    Raises: ValueError for a larger file, and as open_ordinary.
    """
    with open_ordinary(path) as file:
        if max_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size
        # One byte more than allowed, because the file may have grown since its size was asked.
        content = b"" if size > max_bytes else file.read(max_bytes + 1)
    if max(size, len(content)) > max_bytes:
        raise ValueError(f"{path}: {max(size, len(content))} bytes, expected at most {max_bytes}.")
    return content


def hash_of_file(path: Path, max_bytes: int | None = None) -> str:
    """Return the SHA-256 of an ordinary file, or of a link to one, without having it in memory.

    max_bytes: the largest size of a file that is read; None: any.
    Raises: as `read_file_bytes`.
    """
    with open_ordinary(path) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            raise ValueError(f"{path}: {size} bytes, expected at most {max_bytes}.")
        buffered: Any = file  # it has readinto, which the type BinaryIO does not name
        return hashlib.file_digest(buffered, "sha256").hexdigest()


def read_file_text(
    path: Path, max_bytes: int | None = LARGEST_TEXT_BYTES, errors: str = "strict"
) -> str:
    """Return the content of an ordinary file in UTF-8 as text, its lines ended by \\n.

    errors: what becomes of bytes that are not UTF-8, as in bytes.decode.
    Raises: as `read_file_bytes`; with errors="strict" UnicodeDecodeError, which is a ValueError.
    """
    text = read_file_bytes(path, max_bytes).decode("utf-8", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def open_to_append(path: Path) -> TextIO:
    """Open a file of ours to append lines of text.

    Raises: ValueError for a link of either kind, through which another file would grow.
    """
    handle = open_handle(
        path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _O_NOFOLLOW, refusal=NOT_OURS_MESSAGE
    )
    if os.fstat(handle).st_nlink > 1:
        os.close(handle)
        raise ValueError(f"{path}: {NOT_OURS_MESSAGE}")
    return os.fdopen(handle, "a", buffering=1, encoding="utf-8")


NOT_OURS_MESSAGE = "a link, or not an ordinary file; remove it."


def open_to_change(path: Path) -> BinaryIO:
    """Open a file of ours to change bytes in it. Raises: ValueError for a link."""
    return os.fdopen(open_handle(path, os.O_RDWR | _O_NOFOLLOW, refusal=NOT_OURS_MESSAGE), "rb+")


def open_new(path: Path) -> BinaryIO:
    """Open a file that is not there yet. Raises: FileExistsError where it is, or a link."""
    return os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS_OF_EVERY_OPEN, 0o666), "wb"
    )


def copy_file(source: Path, target: Path, *, follow_links: bool = True) -> None:
    """Copy an ordinary file to a new one; on file systems that can, blocks are shared.

    follow_links: False if `source` must not be a link.
    """
    with (
        open_ordinary(source, follow_links=follow_links) as source_file,
        name_path_in_os_errors(target),
        open_new(target) as target_file,
    ):
        try:
            import fcntl

            fcntl.ioctl(target_file.fileno(), FICLONE, source_file.fileno())
        except (ImportError, OSError):
            while piece := source_file.read(PIECE_BYTES):
                target_file.write(piece)


def make_folder(folder: Path) -> None:
    """Make a folder that the user names, with those above it. A link to a folder is followed.

    Raises: NotADirectoryError with the name of the folder that cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(
            errno.ENOTDIR, "not a folder, choose another place", error.filename
        ) from error


def make_subfolder(folder: Path) -> Path:
    """Make a folder inside of one of ours, if it is missing, and return it.

    Raises: ValueError for a link or a file of this name; OSError where the folder above has gone.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise ValueError(f"{folder}: a link, or not a folder; remove it.") from None
    return folder


def make_private_folder(folder: Path) -> Path:
    """Make a folder that only this user can read and write, if it is missing, and return it.

    Raises: OSError for a link, a folder of another user, or one that others can write.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_own_folder(folder) or folder.lstat().st_mode & 0o022:
        raise OSError(f"{folder} belongs to somebody else, or others can write there.")
    return folder


def path_in_folder(folder: Path, name: object) -> Path:
    """Return the path of the file `name` in a folder; the file need not exist. Raises: ValueError
    for anything but a text that names a file directly in the folder: not for example `../other`."""
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} is not a file of {folder}")
    return folder / name


def remove_folder(folder: Path) -> None:
    """Delete a folder and all in it, as far as possible. What is no folder stays: a link, and what
    it names, and a pipe, for which shutil would wait."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(folder.lstat().st_mode):
            shutil.rmtree(folder, ignore_errors=True)


def missing_folders(folder: Path) -> list[Path]:
    """Return those of the folder and its parents that do not exist, the deepest first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def remove_empty_folders(folders: Sequence[Path]) -> None:
    """Remove these folders, except those that are not empty."""
    for path in folders:
        with contextlib.suppress(OSError):
            path.rmdir()


def is_own_folder(path: Path) -> bool:
    """Return True for a folder of this user, False for a link."""
    status = path.lstat()
    user_id = getattr(os, "geteuid", lambda: status.st_uid)()  # Windows has no such numbers
    return stat.S_ISDIR(status.st_mode) and status.st_uid == user_id
