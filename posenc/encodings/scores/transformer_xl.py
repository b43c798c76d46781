"""Transformer-XL's relative attention: queries score keys and sinusoids of the distance."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn

from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import (
    Cached,
    CachedPositions,
    PositionEncoding,
    QueriesKeys,
    check_head_dim,
    check_heads,
)
from posenc.encodings.base.products_by_distance import ProductsByDistance
from posenc.encodings.base.term import ScoreMod, Tokens
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.numerics.precision import at_least_float32, read_linear
from posenc.frequencies.series import inverse_frequencies
from posenc.positions.tokens import Positions, distances


class TransformerXL(PositionEncoding):
    """Score the query against the key and against the distance, each with a learned bias.

    score[h, i, j] = scale * ((q_i + u_h) . k_j + (q_i + v_h) . W_h R(position_i - position_j)),
    R(D) = [sin(D w_t) | cos(D w_t)],  w_t = 10000^(-2t/embed_dim)

    `transform` adds u to the query, which adds u . k for every key. At contiguous positions W R is
    one table over distances, and the scores are its skewed view. At other positions, integer or
    real, sin and cos of a difference are split into products of those of query and key, so the term
    is one matrix product of inner size embed_dim: exact, at num_heads/2 times the cost. Pass
    earlier segments as Attention's `memory`, with their own positions.

    Args:
        embed_dim: width of the sinusoid, even.
        num_heads: number of query heads.
        head_dim: size of one head.
        clamp_len: the largest distance; larger ones are clamped to it. None: no limit.
        untied: each layer has its own u and v (the authors' untie_r); in the paper layers share
            them.
        interleaved: the columns of projection.weight are for R = [sin, cos, sin, cos, ...], as in
            Conformers (ESPnet, NeMo, wav2vec2-conformer); False: first for all sines, then for all
            cosines, as in the authors' code.

    Shapes: q_positions (batch, q_len), kv_positions (batch, kv_len) -> (batch, num_heads, q_len,
    kv_len). u, v (num_heads, head_dim); projection.weight (num_heads * head_dim, embed_dim).
    Units: distances in tokens; the term is in logits, scaled like q . k. Precision: exact angles,
    products in float32 or better; q + u is rounded once to the dtype of q.
    Raises: ValueError if embed_dim is odd or clamp_len below 1.
    Source: Dai et al. 2019, arXiv:1901.02860, section 3.3; github.com/kimiyoung/transformer-xl.

    >>> encoding = posenc.TransformerXL(embed_dim=64, num_heads=4, head_dim=16)
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> p = torch.arange(6)
    >>> posenc.attention(q, k, v, encoding, q_positions=p, kv_positions=p).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = Claims(
        places=(2, 3),
        source="Dai et al. 2019, arXiv:1901.02860, section 3.3",
        reads_scale=True,
        scope="layer",
    )

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int,
        *,
        clamp_len: int | None = None,
        untied: bool = False,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        if embed_dim % 2:
            raise ValueError(f"TransformerXL: embed_dim must be even, got {embed_dim}.")
        self.clamp_len = clamp_len
        self.interleaved = interleaved
        self.claims = replace(self.claims, shared_parameters=() if untied else ("u", "v"))
        self.exact_frequencies = ExactFrequencies(inverse_frequencies(embed_dim))
        self.u = nn.Parameter(torch.empty(num_heads, head_dim))
        self.v = nn.Parameter(torch.empty(num_heads, head_dim))
        self.projection = nn.Linear(embed_dim, num_heads * head_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal values with standard deviation 0.02, as in the authors' code."""
        for parameter in (self.u, self.v, self.projection.weight):
            nn.init.normal_(parameter, std=0.02)

    def sinusoid(
        self, distance: Real[Tensor, "*where"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*where embed_dim"]:
        """Return the sinusoid R of each distance, clamped to clamp_len: (*distance.shape,
        embed_dim), all sines, then all cosines, also if `interleaved`."""
        if self.clamp_len is not None:
            distance = distance.clamp(-self.clamp_len, self.clamp_len)
        cos, sin = self.exact_frequencies.cos_sin(distance, dtype)
        return torch.cat([sin, cos], dim=-1)

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        assert q.x is not None and k.x is not None
        check_heads(self, self.u.shape[0], q.x)
        check_head_dim(self, self.u.shape[1], q.x)
        dtype = at_least_float32(q.x.dtype)
        return (q.x.to(dtype) + self.u.to(dtype)[:, None]).to(q.x.dtype), k.x

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return k  # only queries change

    def term(self, q: Tokens, k: Tokens) -> "TransformerXLTerm":
        assert q.x is not None
        dtype = at_least_float32(q.x.dtype)
        query_vectors = (q.x.to(dtype) + self.v.to(dtype)[:, None]) * self.scale(q.x.shape[-1])
        return TransformerXLTerm(q, k, query_vectors, self)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        return self.with_table_cache()

    def projected_sinusoids(
        self, distance: Real[Tensor, " distances"], dtype: torch.dtype
    ) -> Float[Tensor, "num_heads distances head_dim"]:
        """Return the projected sinusoid W R of each distance, split by head: (num_heads, distances,
        head_dim)."""
        projected = self._weight_of_sines_and_cosines(dtype) @ self.sinusoid(distance, dtype).mT
        return projected.unflatten(0, self.u.shape).mT

    def projection_by_head(
        self, dtype: torch.dtype
    ) -> Float[Tensor, "num_heads head_dim embed_dim"]:
        """Return the weight W of the projection in this dtype, split by head: (num_heads, head_dim,
        embed_dim), columns for all sines first."""
        return self._weight_of_sines_and_cosines(dtype).unflatten(0, self.u.shape)

    def _weight_of_sines_and_cosines(
        self, dtype: torch.dtype
    ) -> Float[Tensor, "channels embed_dim"]:
        """Return the weight of the projection in this dtype, with the columns of all sines before
        those of all cosines, however they are stored."""
        weight = read_linear(self.projection, dtype).weight
        if not self.interleaved:
            return weight
        return torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1)


class TransformerXLTerm(ProductsByDistance):
    """Add the products of queries, plus v, with the projected sinusoids of the distance to the
    scores."""

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        query_vectors: Float[Tensor, "batch num_heads {len(q)} head_dim"],
        xl: TransformerXL,
    ) -> None:
        dtype = query_vectors.dtype

        def cached_table(key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
            return xl.computed_or_cached((key, dtype), compute, xl.projection.weight)

        ends = None if xl.clamp_len is None else (-xl.clamp_len, xl.clamp_len)
        super().__init__(
            q,
            k,
            ends,
            query_vectors,
            partial(xl.projected_sinusoids, dtype=dtype),
            table_cache=cached_table,
        )
        self.xl = xl

    def _add_at_any_positions(
        self,
        scores: Tensor,
        q: Tokens,
        k: Tokens,
        q_vectors: Tensor | None,
        k_vectors: Tensor | None,
    ) -> Tensor:
        """Return the scores plus the products of queries with sinusoids of distances, at positions
        that need not be contiguous, by one matrix product. Distances beyond clamp_len get the
        product of clamp_len."""
        assert q_vectors is not None
        clamp_len = self.xl.clamp_len
        # q . (W R) = (q W) . R: a coefficient for each sine and cosine of the distance.
        coefficients = q_vectors @ self.xl.projection_by_head(q_vectors.dtype)
        products = self._products_by_difference(coefficients, q.positions, k.positions)
        if clamp_len is None:
            return scores + products
        distance = distances(q.positions, k.positions)
        if distance.ndim == 3:  # (batch, rows, keys)
            distance = distance[:, None]
        for end_distance, is_beyond in (
            (clamp_len, distance > clamp_len),
            (-clamp_len, distance < -clamp_len),
        ):
            end_sinusoid = self.xl.sinusoid(
                torch.tensor([end_distance], device=products.device), products.dtype
            )
            products = torch.where(is_beyond, coefficients @ end_sinusoid.mT, products)
        return scores + products

    def _products_by_difference(
        self, coefficients: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> Tensor:
        """Return a sin(w D) + b cos(w D), summed over all frequencies w, for the distance D of each
        query and key, (batch, num_heads, rows, keys), by one matrix product.

        coefficients: (batch, num_heads, rows, embed_dim), for each query a of all frequencies, then
        b. With D = i - j for a query at i and a key at j,

            a sin(w D) + b cos(w D) =   (a sin(w i) + b cos(w i)) cos(w j)
                                      + (b sin(w i) - a cos(w i)) sin(w j)
        """
        a, b = coefficients.chunk(2, dim=-1)
        q_cos, q_sin = self.xl.exact_frequencies.cos_sin(q_positions, coefficients.dtype)
        q_cos = q_cos.unsqueeze(-3)  # one axis for the heads
        q_sin = q_sin.unsqueeze(-3)
        q_factors = torch.cat([a * q_sin + b * q_cos, b * q_sin - a * q_cos], dim=-1)
        k_factors = torch.cat(
            self.xl.exact_frequencies.cos_sin(kv_positions, coefficients.dtype), dim=-1
        )
        return q_factors @ k_factors.unsqueeze(-3).mT

    def make_score_mod(self) -> ScoreMod:
        assert self.q_vectors is not None
        zeros = self.q_vectors.new_zeros(*self.q_vectors.shape[:3], len(self.k_tokens))
        prepared = self.prepare_blocks(len(self.q_tokens), False)
        bias = prepared.add(zeros, slice(0, len(self.q_tokens)), slice(0, len(self.k_tokens)), None)

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            return score + bias[batch, head, q_idx, kv_idx]

        return mod
