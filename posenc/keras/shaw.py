"""Shaw's relative positions: learned vectors by clipped distance, added to keys and values."""

import math
from typing import Any

import keras

from posenc.keras.position_layer import (
    PositionLayer,
    at_least_float32,
    distances,
    ops,
    require_integers,
    token_positions,
)


@keras.saving.register_keras_serializable(package="posenc")
class ShawAttention(PositionLayer):
    """Attend with a learned vector added to each key and value, selected by the clipped distance.

    score[i, j] = q_i . (k_j + key_table[r]) / sqrt(head_dim),  out_i = sum_j weight[i, j] (v_j +
    value_table[r]),  r = clip(position_j - position_i, -max_distance, max_distance) + max_distance

    Args:
        max_distance: larger distances use the row of this one (k in the paper).
        values: False omits value_table.

    Call: query (batch, q_len, num_heads, head_dim); key, value (batch, kv_len, num_kv_heads,
    head_dim), as for keras.ops.dot_product_attention; whole q_positions and kv_positions (len) or
    (batch, len), by default counted from start_index and from 0; attention_mask that broadcasts to
    (batch, num_heads, q_len, kv_len), True for visible keys -> like query; zeros for a query that
    sees no key. Tables (2 * max_distance + 1, head_dim), shared by all heads.
    Precision: float32.
    Raises: ValueError if max_distance < 1; TypeError for real positions.
    Source: Shaw et al. 2018, arXiv:1803.02155, equations 3-5.
    """

    def __init__(self, *, max_distance: int = 16, values: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if max_distance < 1:
            raise ValueError(f"ShawAttention: max_distance must be >= 1, got {max_distance}.")
        self.max_distance = max_distance
        self.values = values

    def build(self, input_shape) -> None:
        shape = (2 * self.max_distance + 1, input_shape[-1])
        self.key_table = self.add_float_weight("key_table", shape, "glorot_uniform")
        if self.values:
            self.value_table = self.add_float_weight("value_table", shape, "glorot_uniform")

    def row(self, distance: Any) -> Any:
        """Return the row of the tables for each distance (positive: the past)."""
        return self.max_distance - ops.clip(distance, -self.max_distance, self.max_distance)

    def attend(self, query: Any, key: Any, value: Any, row: Any, mask: Any) -> Any:
        """Return the attention's output, like query. `row` has the row of the tables for each pair,
        (q_len, kv_len) or (batch, q_len, kv_len); mask and shapes are as in the class."""
        groups = query.shape[2] // key.shape[2]
        q, k, v = (
            at_least_float32(query),
            *(ops.repeat(at_least_float32(x), groups, axis=2) for x in (key, value)),
        )
        q = q * q.shape[-1] ** -0.5
        row = row if len(row.shape) == 2 else ops.expand_dims(row, 1)
        scores = ops.einsum("bqhd,bkhd->bhqk", q, k)
        by_row = ops.einsum("bqhd,rd->bhqr", q, at_least_float32(self.key_table))
        scores = scores + _gather_by_row(by_row, row)
        weights = masked_softmax(scores, mask)
        out = ops.einsum("bhqk,bkhd->bqhd", weights, v)
        if self.values:  # sum weights by row, without a tensor of q_len x kv_len x rows
            rows = range(2 * self.max_distance + 1)
            sums = [ops.sum(ops.where(row == r, weights, 0.0), axis=-1) for r in rows]
            table = at_least_float32(self.value_table)
            out = out + ops.einsum("bhqr,rd->bqhd", ops.stack(sums, axis=-1), table)
        return self.to_compute_dtype(out)

    def call(
        self,
        query,
        key,
        value,
        q_positions=None,
        kv_positions=None,
        attention_mask=None,
        start_index=0,
    ):
        q_positions = token_positions(self.name, ops.shape(query)[1], q_positions, start_index)
        kv_positions = token_positions(self.name, ops.shape(key)[1], kv_positions, 0)
        require_integers("ShawAttention", q_positions, kv_positions)
        row = self.row(distances(q_positions, kv_positions))
        return self.attend(query, key, value, row, attention_mask)


def _gather_by_row(table: Any, row: Any) -> Any:
    """Return table[..., i, row[..., i, j]] for each pair (i, j): table (..., q_len, rows), row
    (..., q_len, kv_len).

    take_along_axis would make torch compile once per length.
    """
    rows, shape = table.shape[-1], ops.shape(table)[:-1]  # some are tensors under TensorFlow
    first = ops.arange(math.prod(shape), dtype="int32") * rows
    index = ops.reshape(first, (*shape, 1)) + ops.cast(row, "int32")
    return ops.take(ops.reshape(table, (-1,)), index)


def masked_softmax(scores: Any, mask: Any) -> Any:
    """Return the softmax of scores over the keys that `mask` shows; zeros for a query that sees no
    key."""
    if mask is None:
        return ops.softmax(scores, axis=-1)
    mask = ops.cast(mask, "bool")
    weights = ops.softmax(ops.where(mask, scores, -1e30), axis=-1)
    return ops.where(mask, weights, 0.0)
