"""What place 3 adds to scores."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""FlexAttention's signature: (score, batch, head, q_idx, kv_idx) -> score, from operations that
broadcast."""
