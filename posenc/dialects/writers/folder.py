"""A fixed copy of a checkpoint's folder, whole or not there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from posenc.dialects.source import read_json

INDEX = "model.safetensors.index.json"
CLONE = 0x40049409
"""Linux's FICLONE: the copy shares the original's blocks until one of them is written."""


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder beside `out` that takes its place when the block ends without an error.

    Raises: ValueError where `out` exists or its parent cannot be written.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; give a new folder.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise ValueError(f"{out.parent}: cannot write there ({error.strerror}).") from error
    try:
        yield temporary
        os.chmod(temporary, 0o755)  # noqa: PTH101 - mkdtemp made it private
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_files(source: Path, target: Path, leave: frozenset[str] = frozenset()) -> None:
    """Copy a folder's files but those named; subfolders stay behind.

    Raises: ValueError where the weights' index names a file outside of the folder, or a missing
    one.
    """
    check_index(source)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name not in leave:
            copy_file(path, target / path.name)


def check_index(folder: Path) -> None:
    """Raises: ValueError where the weights' index names no file of this folder."""
    path = folder / INDEX
    if not path.is_file():
        return
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict):
        raise ValueError(f"{path}: weight_map must be an object.")
    for name in sorted({str(v) for v in names.values()}):
        if len(PurePosixPath(name).parts) != 1 or name in (".", "..") or "\\" in name:
            raise ValueError(f"{path}: names {name!r}, a file outside of its folder.")
        if not (folder / name).is_file():
            raise ValueError(f"{path}: names {name!r}, which is not there.")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file; on file systems that can, blocks are shared instead of copied."""
    with source.open("rb") as old, target.open("wb") as new:
        try:
            import fcntl

            fcntl.ioctl(new.fileno(), CLONE, old.fileno())
            return
        except (ImportError, OSError):
            pass
    shutil.copyfile(source, target)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write a config.json as transformers does."""
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
