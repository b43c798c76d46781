"""DeBERTa's disentangled attention: queries and keys score learned vectors of distances."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encodings.base.check_inputs import require_integers
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import PositionEncoding, check_head_dim, check_heads
from posenc.encodings.base.products_by_distance import ProductsByDistance
from posenc.encodings.base.term import Term, Tokens
from posenc.encodings.numerics.precision import at_least_float32, read_linear
from posenc.encodings.numerics.slopes_and_buckets import deberta_bucket_ends
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.numerics.torch_modes import extremes_if_readable
from posenc.positions.tokens import Positions


class DeBERTa(PositionEncoding):
    """Add content-to-position and position-to-content scores read from a table of distances.

    score[i, j] = (q_i . k_j + q_i . K[r] + k_j . Q[r]) / sqrt(terms * head_dim),
    K = pos_key(P), Q = pos_query(P),  r = clip(bucket(position_i - position_j) + span, 0,
    2 span - 1)

    terms is the number of terms in use, 3 by default. The factor 1/sqrt(terms) is part of the
    method: it also multiplies q_i . k_j (`scale`). All layers share the table P; each has its own
    projections. In the last term the paper's equation reads row clip(bucket(position_j -
    position_i) + span); the released code, and the default here, reads row r.

    Args:
        embed_dim: width of the table.
        num_heads, num_kv_heads, head_dim: sizes of the attention; num_kv_heads=None means
            num_heads, head_dim=None means embed_dim / num_heads.
        max_distance: larger distances use one row, or one bucket (max_relative_positions).
        num_buckets: None for a row per distance (v1), or an even number of buckets per side (v2 and
            v3: 256 with max_distance 512), the nearer half exact, the rest logarithmic.
        layer_norm: normalise the table (v2 and v3).
        share_att_key: project with the attention's own q_proj and k_proj (v3), set by
            `share_projections`.
        c2p, p2c: which of the two terms to use.
        paper_p2c: the paper's index in the position-to-content term.
        clamp: with buckets, keys `max_distance` or more ahead read row 1, as in microsoft/DeBERTa,
            which clamps distances first. False: they read row 0, as in transformers, which does
            not. All other rows are the same in both.

    Shapes: q_positions (q_len), kv_positions (kv_len), integer. table (2 span, embed_dim), span =
    num_buckets or max_distance.
    Units: distances in tokens; the terms are in logits. Precision: bucket edges are exact whole
    numbers; products in float32 or better.
    Raises: ValueError for invalid buckets or missing shared projections; TypeError for positions
    that are not integers.
    Source: He et al. 2020, arXiv:2006.03654, equation 4, and 2021, arXiv:2111.09543;
    github.com/microsoft/DeBERTa.

    >>> encoding = posenc.DeBERTa(64, 4, max_distance=128)
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> p = torch.arange(6)
    >>> posenc.attention(q, k, v, encoding, q_positions=p, kv_positions=p).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = Claims(
        places=(3,),
        source="He et al. 2020, arXiv:2006.03654, equation 4; code of microsoft/DeBERTa",
        own_scale=True,
        reads_scale=True,
        scope="layer",
    )

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
        clamp: bool = True,
    ) -> None:
        super().__init__()
        if not (c2p or p2c):
            raise ValueError("DeBERTa: at least one of c2p and p2c must be True.")
        if max_distance < 1 or not _buckets_fit(num_buckets, max_distance):
            raise ValueError(
                "DeBERTa: num_buckets must be even, at least 4, and below 2 * (max_distance - 1); "
                f"got num_buckets={num_buckets}, max_distance={max_distance}."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.max_distance = max_distance
        self.num_buckets = num_buckets
        self.c2p = c2p
        self.p2c = p2c
        self.paper_p2c = paper_p2c
        self.clamp = clamp
        self.span = max_distance if num_buckets is None else num_buckets
        self.table = nn.Parameter(torch.empty(2 * self.span, embed_dim))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-7) if layer_norm else None
        shared_names = ("table", "norm.weight", "norm.bias") if layer_norm else ("table",)
        self.claims = replace(self.claims, needs_raw_k=p2c, shared_parameters=shared_names)
        self.share_att_key = share_att_key
        # In a tuple, because nn.Module would register modules as its own.
        self._attention_projections: tuple[nn.Linear, nn.Linear] | None = None
        self.pos_key = None
        self.pos_query = None
        if c2p and not share_att_key:
            self.pos_key = nn.Linear(embed_dim, num_heads * self.head_dim)
        if p2c and not share_att_key:
            self.pos_query = nn.Linear(embed_dim, num_heads * self.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw normal values with standard deviation 0.02; set biases to zero."""
        nn.init.normal_(self.table, std=0.02)
        for projection in (self.pos_key, self.pos_query):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.02)
                nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def scale(self, head_dim: int) -> float:
        num_products = 1 + int(self.c2p) + int(self.p2c)  # q . k, and one for each term in use
        return (num_products * head_dim) ** -0.5

    def share_projections(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Use these modules of an attention, from now on, to project the table. They are not
        registered as submodules, so that their parameters are not counted twice."""
        if not self.share_att_key:
            raise ValueError(
                "DeBERTa: this encoding has its own projections; build it with share_att_key=True."
            )
        self._attention_projections = (q_proj, k_proj)

    def bucket(self, distance: Int[Tensor, "*where"]) -> Int[Tensor, "*where"]:
        """Return the bucket of each integer distance (positive: the past), with the sign of the
        distance; the distance itself if num_buckets is None."""
        if self.num_buckets is None:
            return distance
        middle = self.num_buckets // 2
        bucket_ends = torch.tensor(
            deberta_bucket_ends(self.num_buckets, self.max_distance), device=distance.device
        )
        magnitude = distance.abs()
        far_bucket = middle + torch.bucketize(magnitude.contiguous(), bucket_ends)
        if not self.clamp:
            far_bucket = far_bucket + (magnitude >= self.max_distance)
        return torch.where(magnitude <= middle, distance, far_bucket * distance.sign())

    def table_row(self, distance: Int[Tensor, "*where"]) -> Int[Tensor, "*where"]:
        """Return the row of the table for each integer distance, 0 to 2 span - 1."""
        return (self.bucket(distance) + self.span).clamp(0, 2 * self.span - 1)

    def term(self, q: Tokens, k: Tokens) -> Term:
        require_integers("DeBERTa", q.positions, k.positions)
        assert q.x is not None
        check_heads(self, self.num_heads, q.x)
        check_head_dim(self, self.head_dim, q.x)
        dtype = at_least_float32(q.x.dtype)
        scale = self.scale(self.head_dim)

        def position_keys(distance: Tensor) -> Tensor:
            """Return the projected row K[r] of each distance, which is multiplied with queries:
            content to position."""
            _, pos_key = self._projections()
            return scale * self._project_rows(pos_key, self.table_row(distance), dtype)

        def position_queries(distance: Tensor) -> Tensor:
            """Return the projected row Q[r] of each distance, which is multiplied with keys:
            position to content."""
            pos_query, _ = self._projections()
            row = self.table_row(-distance if self.paper_p2c else distance)
            return scale * self._project_rows(pos_query, row, dtype)

        def cached_table(key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
            layers = [layer for layer in (*self._projections(), self.norm) if layer is not None]
            weights = (weight for layer in layers for weight in layer.parameters())
            return self.computed_or_cached((key, dtype, scale), compute, self.table, *weights)

        return ProductsByDistance(
            q,
            k,
            (-self.max_distance, self.max_distance),
            q_vectors=q.x.to(dtype) if self.c2p else None,
            read_q_table=position_keys if self.c2p else None,
            k_vectors=k.x.to(dtype) if self.p2c and k.x is not None else None,
            read_k_table=position_queries if self.p2c else None,
            table_cache=cached_table,
        )

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        return self.with_table_cache()

    def _projections(self) -> tuple[nn.Linear | None, nn.Linear | None]:
        """Return the linear layers that project the table to Q and to K, in this order; None for
        one that is not used. Raise ValueError if they are to be shared and `share_projections` was
        not called."""
        if not self.share_att_key:
            return self.pos_query, self.pos_key
        if self._attention_projections is None:
            raise ValueError(
                "DeBERTa: share_att_key=True needs the attention's projections: call "
                "share_projections(attention.q_proj, attention.k_proj) for each layer."
            )
        return self._attention_projections

    def _project_rows(
        self, projection: nn.Linear | None, row_indices: Int[Tensor, " rows"], dtype: torch.dtype
    ) -> Float[Tensor, "num_heads rows head_dim"]:
        """Return the rows of the table with these indices, projected and split by query head:
        (num_heads, rows, head_dim). A projection with fewer heads serves several query heads with
        each."""
        assert projection is not None
        # None: not known without waiting for the device.
        extremes = extremes_if_readable(row_indices)
        first_row, last_row = (0, 2 * self.span - 1) if extremes is None else map(int, extremes)
        # If at least twice as many rows are asked for as the span has, as with buckets, each row of
        # the span is projected once and then copied. The factor 2, chosen, pays for the copy.
        projects_span = 2 * (last_row + 1 - first_row) < len(row_indices)
        rows_to_project = (
            torch.arange(first_row, last_row + 1, device=row_indices.device)
            if projects_span
            else row_indices
        )
        table = self._read_table(rows_to_project, dtype)
        weight, bias = read_linear(projection, dtype)
        projected_rows = weight @ table.mT
        if bias is not None:
            projected_rows = projected_rows + bias[:, None]
        projected_rows = projected_rows.unflatten(0, (-1, self.head_dim))  # (heads, head_dim, rows)
        if projects_span:
            projected_rows = projected_rows[..., row_indices - first_row]
        return repeat_kv_heads(projected_rows, self.num_heads, dim=0).mT

    def _read_table(
        self, row_indices: Int[Tensor, " rows"], dtype: torch.dtype
    ) -> Float[Tensor, "rows embed_dim"]:
        """Return the rows of the table with these indices, (rows, embed_dim) in `dtype`, normalised
        if layer_norm=True."""
        table_rows = self.table[row_indices].to(dtype)
        if self.norm is None:
            return table_rows
        weight = self.norm.weight.to(dtype)
        bias = self.norm.bias.to(dtype)
        return F.layer_norm(table_rows, weight.shape, weight, bias, self.norm.eps)


def _buckets_fit(num_buckets: int | None, max_distance: int) -> bool:
    """Return True if the buckets are valid: None, or an even number of at least 4 with num_buckets
    / 2 below max_distance - 1. Half of them have one distance each, and the others must reach
    farther."""
    if num_buckets is None:
        return True
    return num_buckets >= 4 and num_buckets % 2 == 0 and max_distance - 1 > num_buckets // 2
