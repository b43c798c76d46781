"""PoPE: a channel's magnitude depends on the content, its angle on the position."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import Cached, CachedPositions
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.queries_keys.rotate import rotate
from posenc.encodings.queries_keys.rotation import QueryKeyEncoding, check_keys
from posenc.frequencies.series import inverse_frequencies
from posenc.positions.tokens import Positions


class PoPE(QueryKeyEncoding):
    """Give every channel a magnitude from its content and a phase from its position.

    score[i, j] = scale * sum_c softplus(q_ic) softplus(k_jc) cos((i - j) theta_c - delta_hc),
    theta_c = rope_theta^(-c/head_dim)

    A channel's phase does not depend on its content, so content and position do not mix.
    `transform` makes q and k twice as wide.

    Args:
        head_dim: size of one head.
        num_kv_heads: number of key/value heads; each has its own phases, shared by its query heads.
        rope_theta: base of the geometric series of frequencies.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim) -> the
    same, twice as wide. weight: (num_kv_heads, head_dim), delta before it is clamped to -2 pi .. 0.
    Units: positions in tokens, delta in radians. Precision: exact angles, float32, rounded once.
    Raises: ValueError if k has another shape.
    Source: Gopalakrishnan et al. 2025, arXiv:2509.10534, section 3.

    >>> pope = posenc.PoPE(head_dim=16, num_kv_heads=4)
    >>> q, k = pope(torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16), torch.arange(6))
    >>> q.shape  # the cosines and the sines
    torch.Size([1, 4, 6, 32])
    """

    claims = Claims(
        places=(2,),
        source="Gopalakrishnan et al. 2025, arXiv:2509.10534, section 3",
        own_scale=True,
        scope="layer",
    )

    def __init__(self, head_dim: int, num_kv_heads: int, rope_theta: float = 10000.0) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.exact_frequencies = ExactFrequencies(inverse_frequencies(2 * head_dim, rope_theta))
        self.weight = nn.Parameter(torch.empty(num_kv_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set all phases delta to zero."""
        nn.init.zeros_(self.weight)

    def prepare(self, positions: Positions, length: int | None = None) -> "PoPE":
        """Return a copy that caches its table; positions and length are not used."""
        return self.with_table_cache()

    def transform(
        self, q: Tokens, k: Tokens
    ) -> tuple[
        Float[Tensor, "batch num_heads {len(q)} {2*self.head_dim}"],
        Float[Tensor, "batch num_kv_heads {len(k)} {2*self.head_dim}"],
    ]:
        assert q.x is not None and k.x is not None
        check_keys(self, k.x)
        dtype = at_least_float32(q.x.dtype)
        q_cos, q_sin = self._cos_sin(q, dtype)
        cos, sin = self._cos_sin(k, dtype)
        delta = self.weight.to(dtype).clamp(-2 * math.pi, 0)[:, None]  # (num_kv_heads, 1, head_dim)
        delta_cos = delta.cos()
        delta_sin = delta.sin()
        # cos and sin of the key's angle plus delta, by the addition theorems
        k_cos = cos * delta_cos - sin * delta_sin
        k_sin = sin * delta_cos + cos * delta_sin
        return _magnitudes_at_angles(q.x, q_cos, q_sin), _magnitudes_at_angles(k.x, k_cos, k_sin)

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        cos, sin = self.exact_frequencies.cos_sin(after - before, torch.float64)
        return rotate(k, cos, sin, interleaved=False)  # channel c and its sine at c + head_dim

    def _cos_sin(self, tokens: Tokens, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin of position times frequency, (..., 1, len, head_dim), to broadcast
        over heads."""

        def compute() -> tuple[Tensor, Tensor]:
            cos, sin = self.exact_frequencies.cos_sin(tokens.positions, dtype)
            return cos.unsqueeze(-3), sin.unsqueeze(-3)

        if not isinstance(tokens.positions_or_range, range):
            return compute()
        return self.computed_or_cached((tokens.positions_or_range, dtype, tokens.device), compute)


def _magnitudes_at_angles(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return vectors twice as wide as x: softplus(x) * cos in the first half of the channels,
    softplus(x) * sin in the second, in the dtype of x."""
    magnitude = F.softplus(x.to(cos.dtype))
    return torch.cat([magnitude * cos, magnitude * sin], dim=-1).to(x.dtype)
