"""Selective RoPE: rotary embeddings whose angles add up over the tokens, as their content says."""

from __future__ import annotations

import torch
from jaxtyping import Float, Real, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from posenc import Claims, PositionEncoding, Tokens
from posenc.encodings.base.position_encoding import QueriesKeys, check_head_dim
from posenc.encodings.numerics.precision import at_least_float32, read_linear
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.queries_keys.rotate import rotate
from posenc.frequencies.series import inverse_frequencies

TAPS = 4
"""Tokens that the convolution reads, the present one included."""
RANK = 16


class SelectiveRoPE(PositionEncoding):
    """Rotate q and k by running sums of steps that a small network computes from the tokens.

    angle[h, t] at i = inv_freq[t] * sum_{l <= i} step_l[h, t]
    step = conv(up down unit(x)), a causal convolution of 4 tokens per channel

    A head's relative angle is the sum of the steps between key and query, so a model can rotate
    less where nothing happens. The order is that of tokens in memory; positions say which tokens
    follow each other, so the convolution does not reach into other documents or padding that begin
    again at 0. It does reach tokens that only a mask hides, as in the authors' code, which posenc's
    contract forbids: this is an example and not in the registry. The authors' optional gate and
    bias are left out.

    Args:
        embed_dim: width of x, a multiple of num_kv_heads.
        num_kv_heads: key/value heads; each has its own angles, shared by its query heads.
        head_dim: size of one head, even.
        rope_theta: base of the geometric series of frequencies.

    Shapes: down (16, embed_dim), up (num_kv_heads * head_dim/2, 16), taps (num_kv_heads,
    head_dim/2, 4); the state (batch, num_kv_heads, len, 2 head_dim + 1) is the sums, the latest
    four values before the convolution and the position. Pairs are (t, t + head_dim/2).
    Units: radians. Precision: sums and angles in float64, rotated in float32, rounded once.
    Raises: ValueError if head_dim is odd, or embed_dim is no multiple of num_kv_heads.
    Source: Movahedi et al. 2026, arXiv:2511.17388; github.com/timurcarstensen/selective-rope.

    `posenc compare ./docs/examples/selective_rope.py:SelectiveRoPE rope` compares it.
    """

    claims = Claims(
        places=(2,),
        source="Movahedi et al. 2026, arXiv:2511.17388; github.com/timurcarstensen/selective-rope",
        permutation_invariant=False,
        causal_only=True,
        scope="layer",
        state_kept="last",
    )

    def __init__(
        self, embed_dim: int, num_kv_heads: int, head_dim: int, rope_theta: float = 500000.0
    ) -> None:
        super().__init__()
        if head_dim % 2 or embed_dim % num_kv_heads:
            raise ValueError(
                "SelectiveRoPE: head_dim must be even and embed_dim a multiple of num_kv_heads, "
                f"got {head_dim}, {embed_dim} and {num_kv_heads}."
            )
        self.num_kv_heads, self.head_dim, self.rope_theta = num_kv_heads, head_dim, rope_theta
        channels = num_kv_heads * head_dim // 2
        self.down = nn.Linear(embed_dim, RANK, bias=False)
        self.up = nn.Linear(RANK, channels, bias=False)
        self.taps = nn.Parameter(torch.empty(num_kv_heads, head_dim // 2, TAPS))
        self.inv_freq = tuple(map(float, inverse_frequencies(head_dim, rope_theta)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.down.reset_parameters()
        self.up.reset_parameters()
        nn.init.uniform_(self.taps, -(TAPS**-0.5), TAPS**-0.5)

    def state(
        self,
        x: Float[Tensor, "batch seq_len embed_dim"],
        positions: Real[Tensor, "#batch seq_len"] | Real[Tensor, " seq_len"],
        past: Shaped[Tensor, "batch heads past_len *state"] | None = None,
    ) -> Float[Tensor, "batch heads seq_len width"]:
        parts = x.double().unflatten(-1, (self.num_kv_heads, -1))
        unit = parts * (parts.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        down = read_linear(self.down, torch.float64)
        up = read_linear(self.up, torch.float64)
        low = F.linear(unit.flatten(-2), down.weight)
        step = F.linear(low, up.weight).unflatten(-1, (self.num_kv_heads, -1))
        step = step.transpose(1, 2)  # (batch, heads, len, pairs)
        batch, heads, length, pairs = step.shape
        where = positions.double().expand(batch, length)[:, None, :, None].expand(-1, heads, -1, -1)
        before = step.new_zeros(batch, heads, 1, (1 + TAPS) * pairs + 1)
        sums, latest, last = (before if past is None else past[:, :, -1:]).split(
            [pairs, TAPS * pairs, 1], -1
        )
        ago = torch.arange(TAPS - 1, -1, -1, device=x.device)
        steps = torch.cat([latest.reshape(batch, heads, TAPS, pairs), step], 2)
        places = torch.cat([last - ago[:, None], where], 2)
        # (batch, heads, len, pairs or 1, TAPS): each token's last four, itself included.
        steps, places = (
            torch.stack([each[:, :, i : i + length] for i in range(1, 1 + TAPS)], -1)
            for each in (steps, places)
        )
        latest = torch.where(where[..., None] - places == ago, steps, 0.0)
        sums = sums + (latest * self.taps.double()[:, None]).sum(-1).cumsum(2)
        return torch.cat([sums, latest.transpose(-1, -2).flatten(-2), where], -1)

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        return self._rotated(q), self._rotated(k)

    def _rotated(self, tokens: Tokens) -> Tensor:
        x = tokens.x
        assert x is not None and tokens.state is not None
        check_head_dim(self, self.head_dim, x)
        sums = tokens.state[..., : self.head_dim // 2]
        angle = repeat_kv_heads(sums * sums.new_tensor(self.inv_freq), x.shape[1]).flatten(0, 1)
        dtype = at_least_float32(x.dtype)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        rows = x.flatten(0, 1)[:, None]  # one per head
        return rotate(rows, cos, sin, interleaved=False).view_as(x)
