"""What the scripts beside this file refuse before anything is trained or written, and how they end
where they fail."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from posenc.command_line.errors import RunFailed, Stopped, disk_is_full


@contextlib.contextmanager
def refusing(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End as `posenc` does, with one line: exit code 2 for wrong input, 1 where the run failed, 130
    after Ctrl-C."""
    try:
        yield
    except Stopped as error:
        parser.exit(130, f"{parser.prog}: stopped; {error}.\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped.\n")
    except RunFailed as error:
        parser.exit(1, f"{parser.prog}: {_line(error)}\n")
    except (ValueError, OSError) as error:
        if disk_is_full(error):
            parser.exit(1, f"{parser.prog}: the disk is full: {_line(error)}\n")
        parser.error(_line(error))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def check_folder(option: str, folder: Path) -> None:
    """Raises: ValueError for a folder that cannot be made, or not written into."""
    here = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not here.is_dir():
        raise ValueError(f"{option}: {here} is not a folder.")
    if not os.access(here, os.W_OK | os.X_OK):
        raise ValueError(f"{option}: cannot write into {here}.")


def check_file(option: str, path: Path) -> None:
    """Raises: ValueError for a file that cannot be written."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{option}: {path} is not a file.")
    check_folder(option, path.parent)
