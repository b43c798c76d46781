"""DeBERTa's disentangled attention: queries meet projected distances, and distances meet keys."""

from __future__ import annotations

from functools import lru_cache
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encoding.base import PositionEncoding, check_head_dim, check_heads
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.terms.bands import AddBands, Bands
from posenc.terms.by_distance import AddByDistance, require_whole


class DeBERTa(PositionEncoding):
    """Add content-to-position and position-to-content scores read from a table of distances.

    score[i, j] = (q_i . k_j + q_i . K[r] + k_j . Q[r]) / sqrt(terms * head_dim),
    K = pos_key(P), Q = pos_query(P),  r = clip(bucket(position_i - position_j) + span, 0,
    2 span - 1)

    terms counts those in use, 3 by default. The table P is one for all layers, the projections are
    each layer's own. The paper's equation reads row clip(bucket(position_j - position_i) + span)
    in the last term, the released code the same row in both; the code is the default.

    Args:
        embed_dim: width of the table.
        num_heads, num_kv_heads, head_dim: of the attention; None means num_heads, embed_dim /
            num_heads.
        max_distance: distances from here on share a row, or a bucket (max_relative_positions).
        num_buckets: None for a row per distance (v1), or that many logarithmic buckets per side,
            even (v2 and v3: 256 with max_distance 512); the nearer half is exact.
        layer_norm: normalise the table (v2 and v3).
        share_att_key: project with the attention's own q_proj and k_proj (v3), handed over by
            `share_projections`.
        c2p, p2c: which of the two terms to use.
        paper_p2c: the paper's index in the position-to-content term.

    Shapes: q_positions (q_len), kv_positions (kv_len), integer. table (2 span, embed_dim), span =
    num_buckets or max_distance.
    Units: distances in tokens; the terms are in logits. Precision: bucket edges are exact whole
    numbers; products in float32 or better.
    Raises: ValueError where the buckets cannot be laid out, or shared projections are missing;
    TypeError for positions that are not integers.
    Source: He et al. 2020, arXiv:2006.03654, equation 4, and 2021, arXiv:2111.09543;
    github.com/microsoft/DeBERTa.
    """

    places = (3,)
    causal_only = False
    scope = "layer"
    reads_scale = True
    source = "He et al. 2020, arXiv:2006.03654, equation 4; code of microsoft/DeBERTa"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        max_distance: int = 512,
        num_buckets: int | None = None,
        layer_norm: bool = False,
        share_att_key: bool = False,
        c2p: bool = True,
        p2c: bool = True,
        paper_p2c: bool = False,
    ) -> None:
        super().__init__()
        if not (c2p or p2c):
            raise ValueError("DeBERTa: at least one of c2p and p2c must be True.")
        if max_distance < 1 or (
            num_buckets is not None
            and (num_buckets < 4 or num_buckets % 2 or max_distance - 1 <= num_buckets // 2)
        ):
            raise ValueError(
                "DeBERTa: num_buckets must be even, at least 4, and below 2 * (max_distance - 1); "
                f"got num_buckets={num_buckets}, max_distance={max_distance}."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.max_distance, self.num_buckets = max_distance, num_buckets
        self.c2p, self.p2c, self.paper_p2c = c2p, p2c, paper_p2c
        self.needs_raw_k = p2c
        self.span = max_distance if num_buckets is None else num_buckets
        self.table = nn.Parameter(torch.empty(2 * self.span, embed_dim))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-7) if layer_norm else None
        self.shared_parameters = ("table", *(("norm.weight", "norm.bias") if layer_norm else ()))
        self.share_att_key = share_att_key
        self._attention_projections: tuple[nn.Linear, nn.Linear] | None = None
        self._bands: Bands | None = None
        self.pos_key = self.pos_query = None
        if c2p and not share_att_key:
            self.pos_key = nn.Linear(embed_dim, num_heads * self.head_dim)
        if p2c and not share_att_key:
            self.pos_query = nn.Linear(embed_dim, num_heads * self.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02, biases zero, as in the authors' code."""
        nn.init.normal_(self.table, std=0.02)
        for projection in (self.pos_key, self.pos_query):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.02)
                nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def scale(self, head_dim: int) -> float:
        return ((1 + self.c2p + self.p2c) * head_dim) ** -0.5

    def share_projections(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Project the table with these, an attention's own, which keeps them as its parameters."""
        if not self.share_att_key:
            raise ValueError(
                "DeBERTa: this one has projections of its own; build it with share_att_key=True."
            )
        self._attention_projections = (q_proj, k_proj)

    def bucket(self, distance: Tensor) -> Tensor:
        """Signed buckets of integer distances (positive: the past); the distance itself without
        buckets."""
        if self.num_buckets is None:
            return distance
        middle = self.num_buckets // 2
        edges = torch.tensor(
            bucket_ends(self.num_buckets, self.max_distance), device=distance.device
        )
        size = distance.abs()
        far = middle + torch.bucketize(size.contiguous(), edges)
        return torch.where(size <= middle, distance, far * distance.sign())

    def row(self, distance: Tensor) -> Tensor:
        """The row of the table for each distance."""
        return (self.bucket(distance) + self.span).clamp(0, 2 * self.span - 1)

    def _k_row(self, distance: Tensor) -> Tensor:
        return self.row(-distance) if self.paper_p2c else self.row(distance)

    def for_blocks(
        self,
        q: Tensor,
        k: Tensor | None,
        q_positions: Tensor,
        kv_positions: Tensor,
        rows: int,
        causal: bool,
    ) -> Self:
        require_whole("DeBERTa", q_positions, kv_positions)
        dtype, scale = at_least_float32(q.dtype), self.scale(self.head_dim)
        ready = self.shallow_copy()
        with without_autocast(q.device):
            for_q, for_k = self._tables(dtype)
            ready._bands = Bands.of(
                q_positions, kv_positions, rows, causal, (-self.max_distance, self.max_distance),
                for_q=None if for_q is None else lambda d: scale * for_q[:, self.row(d)],
                for_k=None if for_k is None else lambda d: scale * for_k[:, self._k_row(d)],
                k=None if k is None else k.to(dtype),
            )  # fmt: skip
        return ready

    def score_mod(
        self, q, k, q_positions, kv_positions, q_state=None, kv_state=None
    ) -> AddByDistance | AddBands:
        require_whole("DeBERTa", q_positions, kv_positions)
        check_heads(self, self.num_heads, q)
        check_head_dim(self, self.head_dim, q)
        dtype, scale = at_least_float32(q.dtype), self.scale(self.head_dim)
        if self._bands is not None:
            k = None if k is None else k.to(dtype)
            return self._bands.term(q_positions, kv_positions, q.to(dtype), k)
        q_table = k_table = None
        with without_autocast(q.device):
            for_q, for_k = self._tables(dtype)
            if for_q is not None:
                q_table = (q.to(dtype) * scale) @ for_q.mT
            if for_k is not None:
                assert k is not None  # needs_raw_k
                k_table = (k.to(dtype) * scale) @ for_k.mT
        return AddByDistance(q_positions, kv_positions, self.row, q_table, k_table, self._k_row)

    def _tables(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """What queries meet and what keys meet, each (num_heads, 2 span, head_dim) or None."""
        table = self.table.to(dtype)
        if self.norm is not None:
            weight, bias = self.norm.weight.to(dtype), self.norm.bias.to(dtype)
            table = F.layer_norm(table, weight.shape, weight, bias, self.norm.eps)
        pos_query, pos_key = self._projections()
        return (
            self._by_head(pos_key, table) if self.c2p else None,
            self._by_head(pos_query, table) if self.p2c else None,
        )

    def _projections(self) -> tuple[nn.Linear | None, nn.Linear | None]:
        if not self.share_att_key:
            return self.pos_query, self.pos_key
        if self._attention_projections is None:
            raise ValueError(
                "DeBERTa: share_att_key=True needs the attention's projections: call "
                "share_projections(attention.q_proj, attention.k_proj) for each layer."
            )
        return self._attention_projections

    def _by_head(self, projection: nn.Linear | None, table: Tensor) -> Tensor:
        """(num_heads, 2 span, head_dim); a key projection of fewer heads serves its groups."""
        assert projection is not None
        bias = None if projection.bias is None else projection.bias.to(table.dtype)
        heads = F.linear(table, projection.weight.to(table.dtype), bias)
        heads = heads.unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        return heads.repeat_interleave(self.num_heads // heads.shape[0], dim=0)


@lru_cache(maxsize=16)
def bucket_ends(num_buckets: int, max_distance: int) -> tuple[int, ...]:
    """The last distance of bucket m, m + 1, ..., 2m - 2, where m = num_buckets / 2.

    Distance x > m is in bucket m + ceil(ln(x/m) / ln((max_distance-1)/m) * (m-1)), and further ones
    in the last; compared in whole numbers, so that a distance on a boundary falls where the formula
    says.
    """
    middle, furthest = num_buckets // 2, max_distance - 1
    steps = middle - 1
    ends, x = [middle], middle
    for step in range(1, steps):
        while (x + 1) ** steps * middle**step <= middle**steps * furthest**step:
            x += 1
        ends.append(x)
    return tuple(ends)
