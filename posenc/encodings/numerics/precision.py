"""Choose the dtypes in which tables, biases and layers are computed."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posenc.encodings.numerics.torch_modes import autocast_enabled


def float_distance(distance: Tensor) -> Tensor:
    """Return distances in float32, or unchanged if they are float64."""
    return distance if distance.dtype == torch.float64 else distance.to(torch.float32)


def per_head(values: Tensor, like: Tensor) -> Tensor:
    """Return values (num_heads,), one for each head, as (num_heads, 1, ...) to broadcast with a
    tensor of the shape (num_heads, *like.shape), in the wider dtype of the two."""
    return values.to(torch.promote_types(values.dtype, like.dtype)).view(-1, *[1] * like.ndim)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context manager that disables autocast, for results that must be float32."""
    device_kind = device.type
    return (
        torch.autocast(device_kind, enabled=False)
        if autocast_enabled(device_kind)
        else nullcontext()
    )


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 if `dtype` is float64: tables and biases are computed in it."""
    return torch.promote_types(dtype, torch.float32)


class LinearWeights(NamedTuple):
    """Hold the weight (out, in) of a linear layer, and its bias (out), or None if it has no
    bias."""

    weight: Tensor
    bias: Tensor | None


def read_linear(layer: nn.Module, dtype: torch.dtype) -> LinearWeights:
    """Return the weight and the bias of a linear layer, converted to this dtype.

    Encodings read them because they compute in another dtype than their weights, or multiply by
    parts of a weight, and so cannot call the layer.

    Raises: ValueError if calling the layer would compute something else than its weight says, as
    with an adapter or a quantised layer.
    """
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ValueError(
            f"posenc: {type(layer).__name__} stands where an encoding reads the weight of an "
            "nn.Linear, and what it adds to that weight would be left out. Leave LoRA, other "
            "adapters and quantisation away from the encoding's layers; peft trains them whole "
            'by modules_to_save=["posenc_encoding"].'
        )
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return LinearWeights(layer.weight.to(dtype), bias)
