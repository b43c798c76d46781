"""What is being done, on one line of a terminal."""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """Replace the line on stderr by `text`; nothing where nobody looks. "" clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
