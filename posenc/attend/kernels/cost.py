"""What a plan says about its cost, and which keys may be left out."""

import math
from typing import NamedTuple

import torch


class Cost(NamedTuple):
    time: str
    """How time grows."""
    extra_bytes: int
    """Memory beyond inputs and output, per forward."""


def negligible(dtype: torch.dtype) -> float:
    """A key whose score is this far below a row's best has no part in the result: as many keys as
    1 / eps together would not move its last bit, 1e-7 of it in float32, by 1e-7."""
    return 3 * math.log(torch.finfo(dtype).eps)
