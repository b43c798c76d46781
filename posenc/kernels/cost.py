"""What a plan says about its cost."""

from typing import NamedTuple


class Cost(NamedTuple):
    time: str
    """How time grows."""
    extra_bytes: int
    """Memory beyond inputs and output, per forward."""
