"""Copy a large file: by reference where the file system can, never as a link."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

FICLONE = 0x40049409
"""Linux: let a file share another's blocks until one of them is written."""


def clone(source: Path, target: Path) -> bool:
    """Copy the content; whether the file system shares the blocks instead (btrfs, XFS, bcachefs).

    A hard link would be one file with two names: whoever saved over one would change the other.
    Raises: OSError, such as for a full disk.
    """
    with source.open("rb") as read, target.open("wb") as written:
        if _share_blocks(read.fileno(), written.fileno()):
            return True
        shutil.copyfileobj(read, written, 1 << 22)
    return False


def _share_blocks(read: int, written: int) -> bool:
    if sys.platform != "linux":
        return False
    import fcntl

    try:
        fcntl.ioctl(written, FICLONE, read)
    except OSError:  # another file system, or one that cannot
        return False
    return True
