"""Read the weights of an encoding's linear layers."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class LinearWeights(NamedTuple):
    """Weight (out, in) and bias (out) of a linear layer, in the dtype that was asked for."""

    weight: Tensor
    bias: Tensor | None


def read_linear(layer: nn.Module, dtype: torch.dtype) -> LinearWeights:
    """Return the weight and the bias of a linear layer, converted to this dtype.

    Encodings compute in another dtype than their weights, or multiply by parts of a weight, so that
    they cannot call the layer.

    Raises: ValueError if calling it would compute something else than its weight says, as an
    adapter or a quantised layer does.
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
