"""Token positions: what is known about them."""

from __future__ import annotations

import torch
from torch import Tensor


def run_start(positions: Tensor) -> int | None:
    """The first position where all rows are the same run p, p+1, p+2, ...; None where not, or not
    known.

    Reads the values, so it answers only where that costs no synchronisation: on the CPU, outside of
    tracing.
    """
    if (
        torch.compiler.is_compiling()
        or positions.device.type != "cpu"
        or positions.is_floating_point()
    ):
        return None
    if positions.numel() == 0 or type(positions) is not Tensor:
        return None
    start = int(positions.reshape(-1)[0])
    length = positions.shape[-1]
    run = torch.arange(start, start + length)
    return start if bool((positions == run).all()) else None
