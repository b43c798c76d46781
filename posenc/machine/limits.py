"""Check the memory, disk and time that a command needs before it starts."""

MAX_DAYS = 7
"""Longest expected time, in days, that needs no --yes."""
_SECONDS_PER_DAY = 86400


def check_memory_or_disk(
    what: str, needed: int, available: int | None, advice: str, place: str = "memory"
) -> None:
    """Refuse work that cannot fit in memory or on the disk.

    Args:
        what: subject of the message.
        needed: a lower bound in bytes.
        available: bytes; None if unknown, which refuses nothing.
        advice: a sentence that says what to do instead.
        place: "memory" or "disk".

    Raises: ValueError with both numbers if more is needed than available.
    """
    if available is not None and needed > available:
        needs = f"{what} need at least {readable_size(needed)} of {place}"
        raise ValueError(f"{needs}, and there are {readable_size(available)}. {advice}")


def check_time(what: str, seconds: int, may_take_longer: bool, advice: str) -> None:
    """Refuse work that is expected to take more than MAX_DAYS.

    Args:
        what: subject of the message.
        seconds: expected time.
        may_take_longer: True if the user allows any time (--yes); then nothing is refused.
        advice: a sentence that says what to do instead.

    Raises: ValueError with the number of days.
    """
    if seconds > MAX_DAYS * _SECONDS_PER_DAY and not may_take_longer:
        raise ValueError(f"{what} would take about {seconds // _SECONDS_PER_DAY:,} days. {advice}")


def readable_size(count: int) -> str:
    """Return a number of bytes with its unit.

    >>> readable_size(900), readable_size(3 * 2**20), readable_size(5 * 2**40)
    ('900 bytes', '3.0 MiB', '5,120.0 GiB')
    """
    if count < 2**20:
        return f"{count:,} bytes"
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB")
    tenths = 10 * count // unit  # whole numbers, because floats round large sizes
    return f"{tenths // 10:,}.{tenths % 10} {name}"
