"""A score bias that depends on the distance alone."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.encoding.base import PositionEncoding, check_heads
from posenc.positions import distances
from posenc.terms.dense import DenseBias
from posenc.terms.term import ScoreMod


class DistanceBias(PositionEncoding):
    """A score bias that depends on the distance alone: a subclass defines `bias` and has
    everything else.

    score[h, i, j] += bias(q_position[i] - kv_position[j])[h]
    """

    places = (3,)
    causal_only = False

    def bias(self, distance: Tensor) -> Tensor:
        """(num_heads, *distance.shape), in logits, for distances in tokens, positive for the past.

        `distance` is integer or real, of any shape; the result is in float32, in float64 where
        distance or parameters are. `real` and `per_head` do the conversions.
        """
        raise NotImplementedError(f"{type(self).__name__} must define bias(distance)")

    def forward(self, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
        """The dense bias, (num_heads, q_len, kv_len), or (batch, num_heads, q_len, kv_len) for
        batched positions."""
        values = self.bias(distances(q_positions, kv_positions))
        return values if values.ndim == 3 else values.movedim(0, 1)

    def score_mod(self, q, k, q_positions, kv_positions, q_state=None, kv_state=None) -> ScoreMod:
        if q.dtype == torch.float64:  # positions carry the precision that the bias is asked for
            q_positions, kv_positions = q_positions.double(), kv_positions.double()
        values = self(q_positions, kv_positions)
        check_heads(self, values.shape[-3], q)
        return DenseBias(values if values.ndim == 4 else values[None])
