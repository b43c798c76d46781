"""Relative position representations: learned vectors added to keys and values by clipped
distance."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from posenc.encoding.base import PositionEncoding, check_head_dim
from posenc.numbers.heads import grouped_matmul
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.positions import distances
from posenc.terms.bands import AddBands, Bands, weigh
from posenc.terms.by_distance import AddByDistance, require_whole


class Shaw(PositionEncoding):
    """Add a learned vector to each key and each value, by the distance clipped to max_distance.

    score[i, j] = scale * q_i . (k_j + key_table[r]),  out_i = sum_j weight[i, j] (v_j +
    value_table[r]),  r = clip(position_j - position_i, -max_distance, max_distance) + max_distance

    No tensor of q_len x kv_len x head_dim is made: q . key_table has a column per distance, and
    weights are summed per distance before they meet value_table.

    Args:
        head_dim: size of one head; the tables are shared by all heads.
        max_distance: distances from here on share one row on either side (k in the paper).
        values: whether place 4 acts; the paper finds little loss without.

    Shapes: q_positions (q_len), kv_positions (kv_len), integer -> like scores and values. Tables:
    (2 * max_distance + 1, head_dim), row 0 for keys max_distance or more behind the query's
    position.
    Units: distances in tokens. Precision: in float32 or better.
    Raises: ValueError if max_distance < 1; TypeError for positions that are not integers.
    Source: Shaw et al. 2018, arXiv:1803.02155, equations 3-5; github.com/tensorflow/tensor2tensor.
    """

    causal_only = False
    scope = "layer"
    reads_scale = True
    source = "Shaw et al. 2018, arXiv:1803.02155, equations 3-5"

    def __init__(self, head_dim: int, *, max_distance: int = 16, values: bool = True) -> None:
        super().__init__()
        if max_distance < 1:
            raise ValueError(f"Shaw: max_distance must be at least 1, got {max_distance}.")
        self.head_dim, self.max_distance = head_dim, max_distance
        self._keys: Bands | None = None
        self._values: Bands | None = None
        self.places = (3, 4) if values else (3,)  # type: ignore[misc]
        rows = 2 * max_distance + 1
        self.key_table = nn.Parameter(torch.empty(rows, head_dim))
        self.value_table = nn.Parameter(torch.empty(rows, head_dim)) if values else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform, as the authors' code draws them."""
        nn.init.xavier_uniform_(self.key_table)
        if self.value_table is not None:
            nn.init.xavier_uniform_(self.value_table)

    def row(self, distance: Tensor) -> Tensor:
        """The row of the tables for each distance (positive: the past)."""
        return self.max_distance - distance.clamp(-self.max_distance, self.max_distance)

    def for_blocks(
        self,
        q: Tensor,
        k: Tensor | None,
        q_positions: Tensor,
        kv_positions: Tensor,
        rows: int,
        causal: bool,
    ) -> Self:
        require_whole("Shaw", q_positions, kv_positions)
        dtype, scale = at_least_float32(q.dtype), self.scale(self.head_dim)
        where = (q_positions, kv_positions, rows, causal, (-self.max_distance, self.max_distance))
        ready, values = self.shallow_copy(), self.value_table
        ready._keys = Bands.of(
            *where, for_q=lambda d: scale * self.key_table.to(dtype)[None, self.row(d)]
        )
        if values is not None:
            ready._values = Bands.of(*where, for_q=lambda d: values.to(dtype)[None, self.row(d)])
        return ready

    def score_mod(
        self, q, k, q_positions, kv_positions, q_state=None, kv_state=None
    ) -> AddByDistance | AddBands:
        require_whole("Shaw", q_positions, kv_positions)
        check_head_dim(self, self.head_dim, q)
        dtype = at_least_float32(q.dtype)
        if self._keys is not None:
            with without_autocast(q.device):
                return self._keys.term(q_positions, kv_positions, q.to(dtype))
        with without_autocast(q.device):
            table = (q.to(dtype) * self.scale(self.head_dim)) @ self.key_table.to(dtype).mT
        return AddByDistance(q_positions, kv_positions, self.row, table)

    def combine_values(
        self, weights: Tensor, v: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> Tensor:
        out = grouped_matmul(weights, v)
        if self.value_table is None:
            return out
        if v.shape[-1] != self.head_dim:
            raise ValueError(
                f"Shaw: built for head_dim={self.head_dim}, got v with shape {tuple(v.shape)}. "
                "Use values=False where values have another width."
            )
        if self._values is not None:
            return out + weigh(weights, self._values, q_positions, kv_positions)
        distance = distances(q_positions, kv_positions)
        index = self.row(distance if distance.ndim == 2 else distance[:, None])
        sums = weights.new_zeros(*weights.shape[:-1], self.value_table.shape[0])
        sums = sums.scatter_add(-1, index.expand(weights.shape), weights)
        return out + sums @ self.value_table.to(sums.dtype)
