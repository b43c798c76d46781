"""What a command raises when the run itself failed."""

from __future__ import annotations


class RunFailed(Exception):
    """The run itself failed: exit code 1. Wrong input is a ValueError, TypeError or OSError: 2."""
