"""FoX, the forgetting transformer: forget gates between key and query weaken attention."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import (
    ModelShape,
    PositionEncoding,
    check_heads,
    check_state_shape,
)
from posenc.encodings.base.term import PairwiseBias, ScoreMod, Tokens
from posenc.encodings.numerics.precision import at_least_float32, read_linear, without_autocast
from posenc.positions.tokens import distances


class FoX(PositionEncoding):
    """Add the summed logarithms of the forget gates between key and query to the scores.

    score[h, i, j] += sum_{l = j+1 .. i} ln f[h, l],  f[h, l] = sigmoid(weight[h] . x_l + bias[h])

    With a constant gate f this is ALiBi with slope -ln f. CABLE (arXiv:2503.08067) is FoX with
    weight and bias negated, because -softplus(a) = ln sigmoid(-a).

    The order is that of tokens in memory. Pad prompts on the left: gates of padding between the
    prompt and decoded tokens would count.

    Args:
        embed_dim: width of x.
        num_heads: number of query heads.
        bias_init: initial bias of every gate: 0 in the authors' code (f near 1/2), 5 in
            x-transformers (f = 0.993).
        bidirectional: for encoders; a future key gets the sum over l = i+1 .. j of a second set of
            gates.

    Shapes: x (batch, len, embed_dim) -> state (batch, num_heads, len), with a last axis of 2 if
    bidirectional: the running sum, from which scores take differences.
    Units: logits. Precision: gates in float32 or better, the running sum in float64, so differences
    are as exact at token 100000 as at the first.
    Raises: ValueError if q_state or kv_state is missing.
    Source: Lin et al. 2025, arXiv:2503.02130, section 3; github.com/zhixuan-lin.

    >>> fox = posenc.FoX(embed_dim=64, num_heads=4)
    >>> layer = posenc.Attention(64, 4, encoding=fox)
    >>> layer(torch.randn(1, 9, 64), torch.arange(9), mask=posenc.masks.causal).shape
    torch.Size([1, 9, 64])
    """

    claims = Claims(
        places=(3,),
        source="Lin et al. 2025, arXiv:2503.02130, section 3",
        permutation_invariant=False,
        causal_only=True,
        scope="layer",
    )

    def __init__(
        self, embed_dim: int, num_heads: int, *, bias_init: float = 0.0, bidirectional: bool = False
    ) -> None:
        super().__init__()
        self.claims = replace(self.claims, causal_only=not bidirectional)
        self.bidirectional = bidirectional
        self.bias_init = bias_init
        self.gate = nn.Linear(embed_dim, num_heads * (2 if bidirectional else 1))
        self.reset_parameters()

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> "FoX":
        """Build the encoding for a model, with a second set of gates if queries see future keys."""
        return super().from_shape(shape, **{"bidirectional": not shape.causal, **options})

    def reset_parameters(self) -> None:
        """Draw gate weights with standard deviation 0.02, chosen; set all biases to bias_init."""
        nn.init.normal_(self.gate.weight, std=0.02)
        nn.init.constant_(self.gate.bias, self.bias_init)

    def state(
        self,
        x: Float[Tensor, "batch seq_len embed_dim"],
        positions: Real[Tensor, "#batch seq_len"] | Real[Tensor, " seq_len"],
        past: Float[Tensor, "batch num_heads past_len *ways"] | None = None,
    ) -> Float[Tensor, "batch num_heads seq_len *ways"]:
        """Return the running sum of the logarithms of the gates up to each token, (batch,
        num_heads, seq_len), with a last axis of 2 if bidirectional. It continues from the last sum
        in `past`."""
        dtype = at_least_float32(x.dtype)
        with without_autocast(x.device):
            gate_logits = F.linear(x.to(dtype), *read_linear(self.gate, dtype))
        state = F.logsigmoid(gate_logits).double().cumsum(1).transpose(1, 2)  # (batch, gates, len)
        if self.bidirectional:
            state = torch.stack(state.chunk(2, dim=1), dim=-1)
        return state if past is None else past[:, :, -1:] + state

    def term(self, q: Tokens, k: Tokens) -> "FoXTerm":
        if q.state is None or k.state is None:
            raise ValueError(
                "FoX: attention needs q_state and kv_state, the gates' running sums; "
                "take them from encoding.state(x, positions), or use posenc.Attention."
            )
        assert q.x is not None
        check_heads(self, q.state.shape[1], q.x)
        later_sizes = (2,) if self.bidirectional else ()
        for state in (q.state, k.state):
            check_state_shape(self, state, q.x.shape[1], *later_sizes)
        return FoXTerm(q, k, self.bidirectional)


class FoXTerm(PairwiseBias):
    """Add FoX's bias to the scores: the sum of log gates between key and query, as a difference of
    running sums."""

    def __init__(self, q: Tokens, k: Tokens, bidirectional: bool) -> None:
        super().__init__(q, k, _log_gates_on_either_side if bidirectional else _log_gates_since_key)
        if not bidirectional:
            self.query_and_key_bias = self._query_and_key_bias

    def _query_and_key_bias(self) -> tuple[Tensor, Tensor]:
        """Return the running sums of log gates at the queries and at the keys, each (batch,
        num_heads, len) in float64: the bias of a pair is the first minus the second."""
        assert self.q_tokens.state is not None and self.k_tokens.state is not None
        return self.q_tokens.state, self.k_tokens.state

    def make_score_mod(self) -> ScoreMod:  # type: ignore[override]
        """Return a score_mod that subtracts two running sums for each pair, in O(len) memory.

        In three cases return one that reads a table of all differences instead: if the sums need
        gradients, because a kernel would add the gradients of a whole row to one number; if there
        are two sums per token; and in float64, for which two float32 numbers are not exact enough.
        """
        x = self.q_tokens.x
        q_sums = self.q_tokens.state
        k_sums = self.k_tokens.state
        assert x is not None and q_sums is not None and k_sums is not None
        needs_gradient = torch.is_grad_enabled() and (q_sums.requires_grad or k_sums.requires_grad)
        bidirectional = self.query_and_key_bias is None
        if bidirectional or needs_gradient or x.dtype == torch.float64:
            return super().make_score_mod()
        q_high, q_low = _split_into_two_float32(q_sums)
        k_high, k_low = _split_into_two_float32(k_sums)

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            """Return the score of a pair plus its bias, the difference of two running sums."""
            # A state with one row serves the whole batch.
            q_row = torch.zeros_like(batch) if len(q_high) == 1 else batch
            k_row = torch.zeros_like(batch) if len(k_high) == 1 else batch
            high = q_high[q_row, head, q_idx] - k_high[k_row, head, kv_idx]
            low = q_low[q_row, head, q_idx] - k_low[k_row, head, kv_idx]
            return score + (high + low)

        return mod


def _split_into_two_float32(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 sums as two float32 tensors (high, low), whose sum is `sums` up to 2**-48 of
    their size.

    With q = q_high + q_low and k likewise, q - k = (q_high - k_high) + (q_low - k_low). In float32
    each of the two differences and their sum are rounded by 2**-24 of the result, and the low parts
    are at most 2**-24 of the sums. So the error is 2**-23 of q - k and 2**-46 of q and k. (That of
    a difference in float64, rounded to float32, is 2**-24 of q - k.) A kernel needs no float64,
    which most GPUs compute 64 times as slowly.
    """
    high = sums.to(torch.float32)
    low = (sums.double() - high.double()).to(torch.float32)
    return high, low.masked_fill(~high.isfinite(), 0)  # infinity minus itself is NaN


def _log_gates_since_key(q: Tokens, k: Tokens) -> Tensor:
    """Return the sum of log gates from each key to the query, (batch, num_heads, rows, keys), from
    the running sums that are the tokens' states."""
    assert q.state is not None and k.state is not None
    return q.state[..., :, None] - k.state[..., None, :]


def _log_gates_on_either_side(q: Tokens, k: Tokens) -> Tensor:
    """Return the sum of log gates between each key and the query, (batch, num_heads, rows, keys),
    from one set of gates for keys in the past and another one for keys in the future.

    A state has two running sums, S of the first set and T of the second. With i the query:

        past key j:    sum_{l = j+1 .. i} ln f_l =   S_i - S_j
        future key j:  sum_{l = i+1 .. j} ln g_l = -(T_i - T_j)
    """
    assert q.state is not None and k.state is not None
    differences = q.state[..., :, None, :] - k.state[..., None, :, :]
    past_difference, future_difference = differences.unbind(-1)
    is_past = distances(q.positions, k.positions) >= 0
    if is_past.ndim == 3:  # (batch, rows, keys)
        is_past = is_past[:, None]
    return torch.where(is_past, past_difference, -future_difference)
