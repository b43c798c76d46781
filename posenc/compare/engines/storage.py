"""A place without a shared folder where the machines of a comparison meet: what fsspec can reach,
such as s3://bucket/run. It has what the study's folder has: the text, and a folder for each trial.

Results, checkpoints and texts carry hashes, so half of a file is seen.
"""

import contextlib
import hashlib
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import fsspec
from fsspec.implementations.local import LocalFileSystem

from posenc.command_line.errors import one_line
from posenc.compare.trial.result_files import (
    CHECKPOINT_FILE,
    RESULT_FILE,
    TOKENIZER_FILE,
    Cursor,
)
from posenc.files.atomic import is_partial, write_atomically
from posenc.files.opening import (
    make_folder,
    make_subfolder,
    missing_folders,
    read_file_bytes,
    read_file_text,
    remove_empty_folders,
    remove_folder,
)
from posenc.files.sealed_json import seal, unseal
from posenc.lazy import require_package

REQUESTS_AT_ONCE = 16
"""Trials that are copied from a storage at a time: chosen. More did not help a server of S3 on the
same two cores."""
CONTENTS_FILE = "contents.json"
"""In the folder of a text: the hash of each file, written last."""


class Storage:
    """The files below a URL.

    >>> import tempfile
    >>> storage = Storage(f"file://{tempfile.mkdtemp()}")
    >>> storage.write("a/b.txt", b"42")
    >>> storage.read("a/b.txt"), storage.read("a/c.txt")
    (b'42', None)
    """

    def __init__(self, url: str) -> None:
        self.url = url
        if url.startswith("s3:"):
            require_package("s3fs", f"--storage {url}")
        try:
            # No listing is kept: other machines write here.
            self.fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            message = f"--storage {url}: {one_line(error)}. Give a URL that fsspec knows."
            raise ValueError(message) from None
        self.root: str = root.rstrip("/")

    def path(self, name: str) -> str:
        """Return the path of a file in the file system `fs`, from its name below the URL."""
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None where there is none."""
        try:
            return self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, and the folders above it, in place of one of this name."""
        path = self.path(name)
        if isinstance(self.fs, LocalFileSystem):
            make_folder(Path(path).parent)
            write_atomically(path, content)
        else:
            self.fs.pipe_file(path, content)

    def remove(self, names: Iterable[str]) -> None:
        """Delete those of the files that are there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(self.path(name))

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Copy these files of `folder` to the storage, into a folder of the same name, in
        this order."""
        for name in names:
            self.write(f"{folder.name}/{name}", read_file_bytes(folder / name, None))

    def download(self, folder: Path, names: Iterable[str]) -> None:
        """Copy these files from the storage's folder of the same name into `folder`, in
        this order, but for those that have gone meanwhile."""
        for name in names:
            content = self.read(f"{folder.name}/{name}")
            if content is not None:
                make_folder((folder / name).parent)
                write_atomically(folder / name, content)

    def names(self, folder: str) -> list[str]:
        """List all files in a folder and below, by their names in it."""
        parent_path = self.path(folder).rstrip("/")
        paths = self.fs.find(parent_path) if self.fs.exists(parent_path) else []
        return [PurePosixPath(path).relative_to(parent_path).as_posix() for path in paths]

    @contextlib.contextmanager
    def probe_file(self) -> Iterator[tuple[str, str]]:
        """Write a file with a random word, yield the file's name and the word, and delete the file
        after the block under `with`. Other machines prove by `storage_problem` that they read it.

        Raises: ValueError if this machine cannot write or read the file. After any error, folders
        that were made for it are removed.
        """
        # A killed run leaves the name of a half-written file, which the next one deletes.
        name = f".shared.{secrets.token_hex(8)}.partial"
        word = secrets.token_hex(8)
        new_folders = (
            missing_folders(Path(self.root)) if isinstance(self.fs, LocalFileSystem) else []
        )
        try:
            try:
                self.write(name, word.encode())
                if self.read(name) != word.encode():
                    raise OSError("what was written there cannot be read")
            except Exception as error:  # of any of fsspec's file systems
                why = f"this machine cannot write there ({one_line(error)})."
                raise ValueError(f"--storage {self.url}: {why}") from error
            yield name, word
            new_folders = []
        finally:
            with contextlib.suppress(Exception):
                self.remove([name])
            remove_empty_folders(new_folders)

    def upload_text(self, folder: Path) -> None:
        """Copy the folder of a text to the storage, unless it is there whole."""
        hash_by_name = _hash_text_files(folder)
        name = f"{folder.name}/{CONTENTS_FILE}"
        sealed_contents = seal(hash_by_name).encode()
        if self.read(name) != sealed_contents:
            self.upload(folder, hash_by_name)
            self.write(name, sealed_contents)

    def download_text(self, folder: Path) -> None:
        """Copy the text of this name into `folder`, unless it is there whole. Raises: OSError."""
        try:
            hash_by_name = unseal((self.read(f"{folder.name}/{CONTENTS_FILE}") or b"").decode())
        except ValueError:
            raise OSError(f"{self.url} does not hold {folder.name} whole") from None
        if _hash_text_files(folder) == hash_by_name:
            return
        remove_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".text-", dir=folder.parent) as scratch_folder:
            partial_folder = Path(scratch_folder) / folder.name
            self.download(partial_folder, hash_by_name)
            if _hash_text_files(partial_folder) != hash_by_name:
                raise OSError(f"{self.url}/{folder.name} is damaged; delete it there")
            with contextlib.suppress(OSError):  # another trial was faster
                partial_folder.rename(folder)


class Mirror:
    """Copies what a trial writes in `folder` to the storage. A checkpoint that could not be copied
    is tried again at the next call; `copy_error` keeps why.

    copied_text: of the checkpoint.json that was copied last. copied_names: its files.
    """

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.storage = storage
        self.folder = folder
        self.copied_text = ""
        self.copied_names: tuple[str, ...] = ()
        self.copy_error = ""

    def copy_checkpoint(self) -> None:
        """Copy the checkpoint if it is new; tensors first, for the state names them."""
        try:
            checkpoint_text = read_file_text(self.folder / CHECKPOINT_FILE)
            if checkpoint_text == self.copied_text:
                return
            tensors_file = Cursor.from_json(checkpoint_text).tensors
            tensor_bytes = read_file_bytes(self.folder / tensors_file, None)
        except FileNotFoundError:  # there is none, or a newer one has just replaced it
            return
        try:
            self.storage.write(f"{self.folder.name}/{tensors_file}", tensor_bytes)
            self.storage.write(f"{self.folder.name}/{CHECKPOINT_FILE}", checkpoint_text.encode())
            self.copied_text = checkpoint_text
            self.copied_names = (CHECKPOINT_FILE, tensors_file)
            self._remove_checkpoints(self.copied_names)
        except Exception as error:  # of any of fsspec's file systems
            self.copy_error = str(error)

    def copy_result(self) -> None:
        """Copy all that a finished trial wrote, its result last. Checkpoints in the storage go, but
        for the last one where the trial has kept it: more steps go on from there."""
        self.copy_checkpoint()
        paths = [path for path in self.folder.rglob("*") if path.is_file() and not is_partial(path)]
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        new_names = [name for name in names if not name.startswith("checkpoint")]
        self.storage.upload(self.folder, _names_with_result_last(new_names))
        has_kept_checkpoint = CHECKPOINT_FILE in names
        self._remove_checkpoints(self.copied_names if has_kept_checkpoint else ())

    def _remove_checkpoints(self, kept_names: tuple[str, ...]) -> None:
        """Delete the trial's checkpoints in the storage, but for the files in `kept_names`."""
        names = self.storage.names(self.folder.name)
        old_names = [n for n in names if n.startswith("checkpoint") and n not in kept_names]
        self.storage.remove(f"{self.folder.name}/{name}" for name in old_names)


def move_checkpoint(storage: Storage, folder: Path) -> None:
    """Move the checkpoint in a trial's folder, if it has one, to the storage, from which the trial
    goes on. Where the storage has one of as many steps or more, that one stays.

    Raises: OSError if it could not be copied; any error of fsspec's file systems.
    """
    step = _step_of_checkpoint(_read_text_or_empty(folder / CHECKPOINT_FILE))
    if step is None:
        return
    stored_text = (storage.read(f"{folder.name}/{CHECKPOINT_FILE}") or b"").decode(errors="replace")
    stored_step = _step_of_checkpoint(stored_text)
    if stored_step is None or stored_step < step:
        mirror = Mirror(storage, folder)
        mirror.copy_checkpoint()
        if not mirror.copied_text:
            raise OSError(mirror.copy_error or "its tensors are gone")
    (folder / CHECKPOINT_FILE).unlink()
    for path in folder.glob("checkpoint-*.safetensors"):
        path.unlink()


def _read_text_or_empty(path: Path) -> str:
    """Return the text of a file; "" for none, and for one that cannot be read."""
    try:
        return read_file_text(path)
    except (OSError, ValueError):
        return ""


def _step_of_checkpoint(text: str) -> int | None:
    """Return the step of a checkpoint.json from its text; None for one that is damaged or none."""
    try:
        return Cursor.from_json(text).step
    except ValueError:
        return None


def replace_with_stored_files(storage: Storage, folder: Path) -> None:
    """Replace `folder` by what the storage has of it: a checkpoint, a result, or nothing.
    The result is copied last: where it is, a trial counts as finished."""
    remove_folder(folder)
    make_subfolder(folder)
    storage.download(
        folder, sorted(storage.names(folder.name), key=lambda name: name == RESULT_FILE)
    )


def download_result(storage: Storage, folder: Path) -> None:
    """Copy a finished trial from the storage into `folder`, its result last."""
    storage.download(folder, _names_with_result_last(storage.names(folder.name)))


def download_results(storage: Storage, folders: Iterable[Path]) -> None:
    """Copy those of these trials' folders that the storage has with a result, REQUESTS_AT_ONCE at a
    time: each waits most of its time for answers. All names come from one listing."""
    names_by_folder = names_of_trials(storage)

    def download(folder: Path) -> None:
        names = names_by_folder.get(folder.name, [])
        if RESULT_FILE in names:
            storage.download(folder, _names_with_result_last(names))

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        for _ in pool.map(download, folders):  # raises what a thread has raised
            pass


def names_of_trials(storage: Storage) -> dict[str, list[str]]:
    """Return the names of all files in the storage by the folder, of a trial or text, in which they
    are; from one listing."""
    names_by_folder: dict[str, list[str]] = {}
    for name in storage.names(""):
        folder_name, _, name_in_folder = name.partition("/")
        names_by_folder.setdefault(folder_name, []).append(name_in_folder)
    return names_by_folder


def _names_with_result_last(names: Iterable[str]) -> list[str]:
    """Return the names sorted, but result.json last: where it is, a trial counts as finished, so
    all else must be there before. Without it they lack those of checkpoints, which another trial
    may be writing; a finished one has its last checkpoint or none."""
    sorted_names = sorted(names, key=lambda name: (name == RESULT_FILE, name))
    if RESULT_FILE in sorted_names:
        return sorted_names
    return [name for name in sorted_names if not name.startswith("checkpoint")]


def _hash_text_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of symbols (*.u16 or *.u32), and of the tokenizer, in the
    folder of a text, by its name; {} for a folder that is not there."""
    patterns = ("*.u16", "*.u32", TOKENIZER_FILE)
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {path.name: hashlib.sha256(read_file_bytes(path, None)).hexdigest() for path in files}


def storage_problem(url: str, name: str, word: str) -> str | None:
    """Return what is wrong with a storage on the machine that this runs on; None if nothing.

    name, word: the file that another machine wrote there by `Storage.probe_file`, and its content.
    """
    try:
        storage = Storage(url)
        if storage.read(name) != word.encode():
            return "it does not see what was written from here: it is not shared"
        with storage.probe_file():
            return None
    except Exception as error:  # of any of fsspec's file systems
        return f"it cannot read and write there ({one_line(error)})"
