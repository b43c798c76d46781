"""What a command asks of the machine, checked before anything is allocated, read or measured."""

from __future__ import annotations

MOST_DAYS = 7
"""What is expected to take longer starts only when --yes says that it is meant."""


def check_memory(what: str, needed: int, available: int | None, advice: str) -> None:
    """Refuse what certainly does not fit.

    Args:
        what: what needs the memory.
        needed: bytes, a lower bound.
        available: bytes; None where the system does not say.
        advice: what to do instead.

    Raises: ValueError with both numbers.
    """
    if available is not None and needed > available:
        raise ValueError(
            f"{what} need at least {readable_size(needed)} of memory, and there are "
            f"{readable_size(available)}. {advice}"
        )


def check_disk(what: str, needed: int, available: int, advice: str) -> None:
    """Refuse to write more bytes than there is room for.

    Raises: ValueError with both numbers.
    """
    if needed > available:
        raise ValueError(
            f"{what} needs {readable_size(needed)} on disk, and there are "
            f"{readable_size(available)}. {advice}"
        )


def check_time(what: str, seconds: int, yes: bool, advice: str) -> None:
    """Refuse what is expected to take more than a week, unless it is meant.

    Raises: ValueError with the number of days.
    """
    if seconds > MOST_DAYS * 86400 and not yes:
        raise ValueError(f"{what} would take about {seconds // 86400:,} days. {advice}")


def readable_size(count: int) -> str:
    """Bytes in a unit that suits them.

    >>> readable_size(900), readable_size(3 * 2**20), readable_size(5 * 2**40)
    ('900 bytes', '3.0 MiB', '5,120.0 GiB')
    """
    if count < 2**20:
        return f"{count:,} bytes"
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    tenths = 10 * count // unit  # whole numbers: a float cannot hold every size
    return f"{tenths // 10:,}.{tenths % 10} {name}"
