"""How a command ends that does not succeed."""

from __future__ import annotations

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFailed(Exception):
    """The run itself failed: exit code 1. Wrong input is a ValueError, TypeError or OSError: 2."""


class Stopped(Exception):
    """Ctrl-C, and the message says what the same command does next: exit code 130."""


def disk_is_full(error: BaseException) -> bool:
    """Whether the system refused to write more."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL
