"""The ways in which a command can fail."""

from __future__ import annotations

import errno

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFailed(Exception):
    """The run itself failed: exit code 1. Wrong input is a ValueError, TypeError or OSError: 2."""


class Stopped(Exception):
    """Ctrl-C: exit code 130. The message says what the same command will do next."""


def one_line(error: BaseException) -> str:
    """Say what an error of any library says, on one line and not at length."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def disk_is_full(error: BaseException) -> bool:
    """Whether the system refused to write because there is no room."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL
