"""What may be read of a tensor without changing what a tracer sees or waiting for a device."""

from __future__ import annotations

import torch
from torch import Tensor


def transformed() -> bool:
    """True inside grad, jvp or vmap of torch.func, whose tensors have no numbers to read. torch has
    no public way to ask."""
    return torch._C._are_functorch_transforms_active()


def free_ends(t: Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest number of a tensor; None where it has none, or where
    looking would wait for an accelerator, break a trace or meet a transform."""
    if torch.compiler.is_compiling() or transformed() or t.device.type != "cpu" or not t.numel():
        return None
    low, high = t.detach().aminmax()
    return low.item(), high.item()
