"""Where the machines of a comparison meet without a shared folder: a place that fsspec can reach,
such as s3://bucket/run.

It holds what the study's folder holds: the text, and a folder for each trial. Nothing is taken
from there unchecked: results, checkpoints and texts carry hashes, so half of a file is seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from posenc.report.record import seal, unseal

CONTENTS = "contents.json"
"""In the folder of a text: the hash of each file, written last."""


class StorageError(ValueError):
    """The storage cannot be used; the message says which and why."""


class Storage:
    """The files below a URL.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> storage = Storage(f"file://{folder}")
    >>> storage.write("a/b.txt", b"42")
    >>> storage.read("a/b.txt"), storage.read("a/c.txt")
    (b'42', None)
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            # No listing is kept: other machines write here.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StorageError(
                f"--storage {url}: {one_line(error)}. Give a URL that fsspec knows; for s3:// "
                "install posenc[storage]."
            ) from None
        self.root: str = root.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        try:
            return self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        path = self.path(name)
        if isinstance(self.fs, LocalFileSystem):  # elsewhere a name makes its folders
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.fs.pipe_file(path, content)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name))

    def names(self, folder: str) -> list[str]:
        """All files in a folder and below, by their names in it."""
        found = self.fs.find(self.path(folder)) if self.fs.exists(self.path(folder)) else []
        above = PurePosixPath(self.path(folder))
        return [PurePosixPath(path).relative_to(above).as_posix() for path in found]

    def with_results(self) -> set[str]:
        """The folders of trials that have a result."""
        return {
            PurePosixPath(path).parent.name for path in self.fs.glob(self.path("*/result.json"))
        }

    @contextlib.contextmanager
    def token(self) -> Iterator[tuple[str, str]]:
        """A file with a random word, which every machine must be able to read and to answer.

        Raises: StorageError where this one cannot write it.
        """
        name, word = f".posenc-{secrets.token_hex(8)}", secrets.token_hex(8)
        try:
            self.write(name, word.encode())
            if self.read(name) != word.encode():
                raise OSError("what was written there cannot be read")
        except Exception as error:  # of any of fsspec's file systems
            raise StorageError(
                f"--storage {self.url}: this machine cannot write there ({one_line(error)})."
            ) from error
        try:
            yield name, word
        finally:
            with contextlib.suppress(Exception):
                self.remove([name, f"{name}-answer"])

    def answer(self, name: str, word: str) -> str | None:
        """What is wrong with this storage on the machine that this runs on, or None."""
        try:
            if self.read(name) != word.encode():
                return "it does not see what was written from here: the storage is not shared"
            self.write(f"{name}-answer", word.encode())
        except Exception as error:
            return f"it cannot write there ({one_line(error)})"
        return None

    def give_text(self, folder: Path) -> None:
        """Put the folder of a text there, unless it is there whole."""
        files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.u16"))}
        contents = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        if self._contents(folder.name) == contents:
            return
        for name, content in files.items():
            self.write(f"{folder.name}/{name}", content)
        self.write(f"{folder.name}/{CONTENTS}", seal(contents).encode())

    def take_text(self, folder: Path) -> None:
        """Copy the text of this name into `folder`, unless it is there whole. Raises: OSError."""
        contents = self._contents(folder.name)
        if contents is None:
            raise OSError(f"{self.url} does not hold {folder.name} whole")
        if _holds(folder, contents):
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".text-", dir=folder.parent))
        try:
            for name in contents:
                (partial / name).write_bytes(self.read(f"{folder.name}/{name}") or b"")
            if not _holds(partial, contents):
                raise OSError(f"{self.url}/{folder.name} is damaged; delete it there")
            with contextlib.suppress(OSError):  # another trial was faster
                partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _contents(self, folder: str) -> dict[str, Any] | None:
        text = self.read(f"{folder}/{CONTENTS}")
        try:
            return None if text is None else unseal(text.decode())
        except ValueError:
            return None


def _holds(folder: Path, contents: dict[str, Any]) -> bool:
    """Whether the files of a text are there and are what was written."""
    try:
        return all(
            hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
            for name, digest in contents.items()
        )
    except OSError:
        return False


def one_line(error: BaseException) -> str:
    """What an error of any library says, on one line and not at length."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
