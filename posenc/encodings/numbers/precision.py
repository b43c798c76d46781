"""Choose the dtypes in which tables and biases are computed."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from posenc.encodings.numbers.torch_abilities import autocast_enabled


def real(distance: Tensor) -> Tensor:
    """Return distances in float32, or unchanged if they are float64."""
    keep = distance.dtype == torch.float64
    return distance if keep else distance.to(torch.float32)


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """Return values (num_heads,), one for each head, as (num_heads, 1, ...) to broadcast with a
    tensor of the shape (num_heads, *like.shape), in the wider dtype of the two."""
    return values.to(torch.promote_types(values.dtype, like.dtype)).view(-1, *[1] * like.ndim)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context that disables autocast, for results that must be float32."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if autocast_enabled(kind) else nullcontext()


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 if `dtype` is: tables and biases are computed in it."""
    return torch.promote_types(dtype, torch.float32)
