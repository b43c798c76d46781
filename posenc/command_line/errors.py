"""Errors with which a command ends."""

import errno

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class RunFailed(Exception):
    """Report that the run itself failed: exit code 1. Wrong input is a ValueError, TypeError or
    OSError: 2."""


class Stopped(Exception):
    """Report Ctrl-C: exit code 130. The message says what the same command will do next."""


def one_line(error: BaseException) -> str:
    """Return the type of an error and up to 300 letters of its message, on one line."""
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_os_error(error: OSError) -> str:
    """Return which file the system could not open, and why: "a.txt: no such file or folder"."""
    reason = "no such file or folder" if error.errno == errno.ENOENT else error.strerror
    return f"{error.filename}: {reason}." if error.filename else f"{error}"


def disk_is_full(error: BaseException) -> bool:
    """Return True if writing failed because the disk or quota is full."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS
