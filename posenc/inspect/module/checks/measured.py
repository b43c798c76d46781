"""What a check returns."""

from __future__ import annotations

Measured = tuple[bool | None, str]
"""Whether a property holds (None: it does not apply), and the numbers."""
