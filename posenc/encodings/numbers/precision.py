"""In which dtype tables and biases are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def real(distance: Tensor) -> Tensor:
    """A distance to compute with: float32, or float64 where it is that already."""
    keep = distance.dtype == torch.float64
    return distance if keep else distance.to(torch.float32)


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """One value per head, (num_heads,), in at least the dtype of `like` and shaped to broadcast
    against it."""
    return values.to(torch.promote_types(values.dtype, like.dtype)).view(-1, *[1] * like.ndim)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context in which autocast does not round what is computed in float32 for a reason."""
    kind = device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tables and biases for inputs of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)
