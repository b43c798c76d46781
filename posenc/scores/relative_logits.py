"""Inkling's relative logits: each token mixes learned profiles of the distance."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encoding.base import PositionEncoding, check_heads
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.terms.term import ScoreMod


class RelativeLogits(PositionEncoding):
    """Add a bias over the distance that each query composes from learned profiles.

    score[h, i, j] += (state_proj x_i)[h] . profiles[:, position_i - position_j] below `extent`
    tokens of distance, 0 from there on

    With log_scaling=(n, alpha) the whole score is then multiplied by 1 + alpha ln(max(1,
    (position_i + 1) / n)), as in Inkling's global layers. Inkling normalises q and k per head and
    scales by 1/head_dim; here scale() stays 1/sqrt(head_dim).

    Args:
        embed_dim: width of x.
        num_heads: number of query heads.
        extent: number of distances that have a profile, counting 0.
        num_profiles: how many profiles there are to mix.
        log_scaling: (n, alpha) or None for no scaling.

    Shapes: x (batch, len, embed_dim) -> state (batch, num_heads, len, num_profiles); profiles
    (num_profiles, extent), shared by the heads.
    Units: distances in whole tokens (real ones are rounded down); the bias is in logits.
    Precision: states and bias in float32 or better; autocast does not reach them.
    Raises: ValueError where sizes are not positive or the states are missing.
    Source: Inkling, Thinking Machines 2026, without a paper: transformers 5.23, models/inkling.
    """

    places = (3,)
    scope = "layer"
    source = "Inkling, Thinking Machines 2026; transformers 5.23, models/inkling"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        extent: int = 1024,
        num_profiles: int = 16,
        log_scaling: tuple[float, float] | None = None,
    ) -> None:
        super().__init__()
        if extent < 1 or num_profiles < 1:
            raise ValueError(
                f"RelativeLogits: extent and num_profiles must be at least 1, "
                f"got {extent} and {num_profiles}."
            )
        self.num_heads = num_heads
        self.log_scaling = log_scaling
        self.shift_invariant = log_scaling is None
        self.state_proj = nn.Linear(embed_dim, num_heads * num_profiles, bias=False)
        self.profiles = nn.Parameter(torch.empty(num_profiles, extent))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.state_proj.weight, std=0.02)
        nn.init.normal_(self.profiles, std=0.02)

    def token_state(self, x: Tensor, positions: Tensor, past: Tensor | None = None) -> Tensor:
        dtype = at_least_float32(x.dtype)
        with without_autocast(x.device):
            state = F.linear(x.to(dtype), self.state_proj.weight.to(dtype))
        return state.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def score_mod(self, q, k, q_positions, kv_positions, q_state=None, kv_state=None) -> ScoreMod:
        if q_state is None:
            raise ValueError(
                "RelativeLogits: attention needs q_state; take it from "
                "encoding.token_state(x, positions), or use posenc.Attention."
            )
        check_heads(self, self.num_heads, q)
        with without_autocast(q_state.device):
            table = q_state @ self.profiles.to(q_state.dtype)  # (batch, heads, q_len, extent)
        extent = table.shape[-1]
        q_positions, kv_positions = (p.expand(q.shape[0], -1) for p in (q_positions, kv_positions))

        def mod(score, batch, head, q_idx, kv_idx):
            q_position = q_positions[batch, q_idx]
            distance = (q_position - kv_positions[batch, kv_idx]).floor().long()
            near = table[batch, head, q_idx, distance.clamp(0, extent - 1)]
            score = score + near.masked_fill((distance < 0) | (distance >= extent), 0)
            if self.log_scaling is None:
                return score
            start, alpha = self.log_scaling
            share = (q_position + 1).to(score.dtype) / start
            return score * (1 + alpha * share.clamp(min=1).log())

        return mod
