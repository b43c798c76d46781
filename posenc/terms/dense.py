"""A bias as a ready value for every pair."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DenseBias:
    """A score_mod that adds ready values (batch or 1, num_heads, q_len, kv_len)."""

    values: Tensor

    def __call__(
        self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        return score + self.values[batch if len(self.values) > 1 else 0, head, q_idx, kv_idx]

    def block(self, scores: Tensor) -> Tensor:
        """The same for all pairs at once, in place."""
        return scores.add_(self.values)
