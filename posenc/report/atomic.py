"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `path` so that a crash at any moment leaves the old content or the new.

    Text becomes UTF-8; lone surrogates become question marks.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    data = content.encode(errors="replace") if isinstance(content, str) else content
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
