"""FoX, the forgetting transformer: attention that decays by what the tokens between say."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encoding.base import PositionEncoding, check_heads
from posenc.encoding.shape import ModelShape
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.terms.term import ScoreMod


class FoX(PositionEncoding):
    """Add the summed logarithms of the forget gates between key and query to the scores.

    score[h, i, j] += sum_{l = j+1 .. i} ln f[h, l],  f[h, l] = sigmoid(weight[h] . x_l + bias[h])

    With a gate that is the same everywhere this is ALiBi of slope -ln f. CABLE (arXiv:2503.08067)
    is this with weight and bias negated, since -softplus(a) = ln sigmoid(-a).

    The order is the order of the tokens in memory. Tokens put on the right as padding are between
    those before and those after: pad on the left to decode from the cache.

    Args:
        embed_dim: width of x.
        num_heads: number of query heads.
        bias_init: initial bias of every gate: 0 as the authors', so that f starts near 1/2; 5 in
            x-transformers, so that it starts at 0.993.
        bidirectional: for encoders: a second set of gates sums over the tokens j .. i-1 of the
            future, reaching back from key to query.

    Shapes: x (batch, len, embed_dim) -> state (batch, num_heads, len), with a last axis of 2 if
    bidirectional: the running sum, from which scores take differences.
    Units: logits. Precision: gates in float32 or better, the running sum in float64, so that a
    difference is as exact at token 100000 as at the first.
    Raises: ValueError where the states are missing.
    Source: Lin et al. 2025, arXiv:2503.02130, section 3; github.com/zhixuan-lin.
    """

    places = (3,)
    permutation_invariant = False
    scope = "layer"
    source = "Lin et al. 2025, arXiv:2503.02130, section 3"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias_init: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        self.causal_only = not bidirectional
        self.bidirectional = bidirectional
        self.bias_init = bias_init
        self.gate = nn.Linear(embed_dim, num_heads * (2 if bidirectional else 1))
        self.reset_parameters()

    @classmethod
    def from_shape(cls, shape: ModelShape, **options: Any) -> FoX:
        return super().from_shape(shape, **{"bidirectional": not shape.causal, **options})

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.constant_(self.gate.bias, self.bias_init)

    def token_state(self, x: Tensor, positions: Tensor, past: Tensor | None = None) -> Tensor:
        dtype = at_least_float32(x.dtype)
        with without_autocast(x.device):
            gate = F.linear(x.to(dtype), self.gate.weight.to(dtype), self.gate.bias.to(dtype))
        state = F.logsigmoid(gate).double().cumsum(1).transpose(1, 2)  # (batch, gates, len)
        if self.bidirectional:
            state = torch.stack(state.chunk(2, dim=1), dim=-1)
        return state if past is None else past[:, :, -1:] + state

    def score_mod(self, q, k, q_positions, kv_positions, q_state=None, kv_state=None) -> ScoreMod:
        if q_state is None or kv_state is None:
            raise ValueError(
                "FoX: attention needs q_state and kv_state, the gates' running sums; "
                "take them from encoding.token_state(x, positions), or use posenc.Attention."
            )
        check_heads(self, q_state.shape[1], q)
        if not self.bidirectional:
            return lambda score, batch, head, q_idx, kv_idx: (
                score
                + (q_state[batch, head, q_idx] - kv_state[batch, head, kv_idx]).to(score.dtype)
            )
        q_positions, kv_positions = (
            q_positions.expand(q.shape[0], -1),
            kv_positions.expand(q.shape[0], -1),
        )

        def mod(score, batch, head, q_idx, kv_idx):
            past, future = (q_state[batch, head, q_idx] - kv_state[batch, head, kv_idx]).unbind(-1)
            looks_back = q_positions[batch, q_idx] >= kv_positions[batch, kv_idx]
            return score + torch.where(looks_back, past, -future).to(score.dtype)

        return mod

    def split_bias(self, q_positions, kv_positions, q_state=None, kv_state=None):
        if self.bidirectional or q_state is None or kv_state is None:
            return None
        return q_state, kv_state
