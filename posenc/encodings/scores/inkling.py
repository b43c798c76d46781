"""Inkling's relative logits: each query mixes learned profiles, functions of the distance."""

from dataclasses import replace

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import PositionEncoding, check_heads, check_state_shape
from posenc.encodings.base.products_by_distance import ProductsByDistance, TableReader
from posenc.encodings.base.term import ScoreMod, Scores, Tokens, VisiblePairs
from posenc.encodings.numerics.precision import at_least_float32, read_linear, without_autocast


class RelativeLogits(PositionEncoding):
    """Add a bias by distance that each query mixes from learned profiles.

    score[h, i, j] += (state_proj x_i)[h] . profiles[:, position_i - position_j] below `extent`
    tokens of distance, 0 from there on

    With log_scaling=(n, alpha) the sum is then multiplied by 1 + alpha ln(max(1, (position_i + 1) /
    n)), as in Inkling's global layers. Inkling normalises q and k per head and scales by
    1/head_dim; here scale() is 1/sqrt(head_dim).

    Args:
        embed_dim: width of x.
        num_heads: number of query heads.
        extent: number of distances in a profile, counting 0.
        num_profiles: number of profiles to mix.
        log_scaling: (n, alpha) or None for no scaling.

    Shapes: x (batch, len, embed_dim) -> state (batch, num_heads, len, num_profiles); profiles
    (num_profiles, extent), shared by the heads.
    Units: distances in tokens, rounded down; the bias is in logits.
    Precision: states and bias in float32 or better, also under autocast.
    Raises: ValueError if sizes are not positive, or if q_state is missing.
    Source: Inkling, Thinking Machines 2026, without a paper: transformers 5.23, models/inkling.

    >>> encoding = posenc.create("inkling", posenc.ModelShape(64, 4, train_length=32))
    >>> layer = posenc.Attention(64, 4, encoding=encoding)
    >>> layer(torch.randn(1, 9, 64), torch.arange(9), mask=posenc.masks.causal).shape
    torch.Size([1, 9, 64])
    """

    claims = Claims(
        places=(3,),
        source="Inkling, Thinking Machines 2026; transformers 5.23, models/inkling",
        causal_only=True,
        scope="layer",
    )

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
        self.num_heads = num_heads
        self.log_scaling = log_scaling
        # log_scaling multiplies whole scores, q . k too, by a factor that grows with the query's
        # position.
        unscaled = log_scaling is None
        self.claims = replace(
            self.claims, shift_invariant=unscaled, additive=unscaled, own_scale=not unscaled
        )
        self.state_proj = nn.Linear(embed_dim, num_heads * num_profiles, bias=False)
        self.profiles = nn.Parameter(torch.empty(num_profiles, extent))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.state_proj.weight, std=0.02)
        nn.init.normal_(self.profiles, std=0.02)

    def state(
        self,
        x: Float[Tensor, "batch seq_len embed_dim"],
        positions: Real[Tensor, "#batch seq_len"] | Real[Tensor, " seq_len"],
        past: Float[Tensor, "batch num_heads past_len num_profiles"] | None = None,
    ) -> Float[Tensor, "batch num_heads seq_len num_profiles"]:
        """Return the weights with which each token, as a query, mixes the profiles: (batch,
        num_heads, seq_len, num_profiles). `positions` and `past` are not used."""
        dtype = at_least_float32(x.dtype)
        with without_autocast(x.device):
            state = F.linear(x.to(dtype), *read_linear(self.state_proj, dtype))
        return state.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def term(self, q: Tokens, k: Tokens) -> "RelativeLogitsTerm":
        if q.state is None:
            raise ValueError(
                "RelativeLogits: attention needs q_state; take it from "
                "encoding.state(x, positions), or use posenc.Attention."
            )
        assert q.x is not None
        check_heads(self, self.num_heads, q.x)
        check_state_shape(self, q.state, self.num_heads, len(self.profiles))
        # Zeros at both ends, for the future and for distances beyond `extent`.
        profiles = F.pad(self.profiles.to(q.state.dtype), (1, 1)).T
        extent = self.profiles.shape[1]

        def profile_values(distance: Tensor) -> Tensor:
            return profiles[None, distance.clamp(-1, extent) + 1]

        return RelativeLogitsTerm(
            q, k, (-1, extent), q.state, profile_values, log_scaling=self.log_scaling
        )


class RelativeLogitsTerm(ProductsByDistance):
    """Add the bias that each query mixes from the profiles to its scores. With log_scaling, then
    multiply the scores by a factor that depends on the query's position."""

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        ends: tuple[int, int],
        q_vectors: Float[Tensor, "batch num_heads {len(q)} num_profiles"],
        profile_values: TableReader,
        *,
        log_scaling: tuple[float, float] | None,
    ) -> None:
        super().__init__(q, k, ends, q_vectors, profile_values)
        self.log_scaling = log_scaling
        self.additive = log_scaling is None

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        scores = super().add(scores, rows, keys, mask)
        if self.log_scaling is None:
            return scores
        factor = self._log_factor(self.q_tokens[rows].positions, scores.dtype)
        return scores * (factor[:, None] if factor.ndim == 3 else factor)

    def _log_factor(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the factor 1 + alpha ln(max(1, (position + 1) / n)) of each query's scores, (len,
        1) or (batch, len, 1)."""
        assert self.log_scaling is not None
        start, alpha = self.log_scaling
        ratio = (positions + 1).to(dtype) / start
        return (1 + alpha * ratio.clamp(min=1).log()).unsqueeze(-1)

    def make_score_mod(self) -> ScoreMod:
        unscaled_mod = super().make_score_mod()
        if self.log_scaling is None:
            return unscaled_mod
        factors = self._log_factor(self.q_tokens.positions, torch.float32)[..., 0]

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            factor = factors[q_idx] if factors.ndim == 1 else factors[batch, q_idx]
            return unscaled_mod(score, batch, head, q_idx, kv_idx) * factor

        return mod
