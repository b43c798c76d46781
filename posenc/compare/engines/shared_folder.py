"""Whether a folder is the same folder on several machines, and can be written on each."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def token_in(folder: Path) -> Iterator[tuple[str, str]]:
    """A file with a random word, which every machine must be able to read.

    Raises: OSError.
    """
    name, word = f".shared.{secrets.randbelow(10**12)}.partial", secrets.token_hex(8)
    (folder / name).write_text(word, encoding="utf-8")
    try:
        yield name, word
    finally:
        (folder / name).unlink(missing_ok=True)


def answer_in(folder: str, name: str, word: str) -> str | None:
    """What is wrong with this folder on the machine that this runs on, or None.

    >>> import tempfile
    >>> here, other = Path(tempfile.mkdtemp()), tempfile.mkdtemp()
    >>> with token_in(here) as (name, word):
    ...     answer_in(str(here), name, word), answer_in(other, name, word)
    (None, 'it does not see what was written from here: the folder is not shared')
    """
    try:
        if (Path(folder) / name).read_text(encoding="utf-8") != word:
            return "it sees another file of this name: the folder is not shared"
    except FileNotFoundError:
        return "it does not see what was written from here: the folder is not shared"
    except OSError as error:
        return f"it cannot read there ({error.strerror})"
    try:
        with token_in(Path(folder)):
            return None
    except OSError as error:
        return f"it cannot write there ({error.strerror})"
