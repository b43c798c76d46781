"""The result of a check."""

Measured = tuple[bool | None, str]
"""True if a property holds (None: it does not apply), and the numbers."""
