"""Attention with linear biases."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.encoding import DistanceBias, at_least_float32


def slopes(num_heads: int) -> tuple[float, ...]:
    """The authors' slopes for any number of heads, steepest first: 2^(-8h/P) for the largest power
    of two P,
    then every second slope of 2P heads."""
    power = 1 << (num_heads.bit_length() - 1)
    own = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power + 1, 2)]
    return tuple(own + between[: num_heads - power])


class ALiBi(DistanceBias):
    """Add a penalty that grows linearly with distance to the attention scores.

    score[h, i, j] += -slope[h] * |position_i - position_j|

    Args:
        num_heads: number of query heads, > 0.

    Shapes: q_positions (batch, q_len), kv_positions (batch, kv_len) -> (batch, num_heads, q_len,
    kv_len).
    Units: positions in tokens; the bias is in logits (added before softmax, after
    1/sqrt(head_dim)).
    Precision: computed in float32 from the distance, so that it does not lose bits at far
    positions.
    Raises: ValueError if num_heads < 1.
    Source: Press et al. 2022, arXiv:2108.12409, section 3;
    github.com/ofirpress/attention_with_linear_biases.
    """

    source = "Press et al. 2022, arXiv:2108.12409, section 3"

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"ALiBi: num_heads must be at least 1, got {num_heads}.")
        self.slopes = slopes(num_heads)

    def bias(self, distance: Tensor) -> Tensor:
        dtype = at_least_float32(distance.dtype if distance.is_floating_point() else torch.float32)
        slope = torch.tensor(self.slopes, dtype=dtype, device=distance.device)
        return -slope.view(-1, *[1] * distance.ndim) * distance.abs().to(dtype)
