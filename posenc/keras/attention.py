"""Multi-head attention with a position encoding, and attention with Shaw's relative positions."""

import functools
import math
from typing import Any

import keras

from posenc.keras.biases import ScoreBias
from posenc.keras.position_layer import (
    PositionLayer,
    at_least_float32,
    distances,
    ops,
    require_integers,
    restore_layer,
    token_positions,
)
from posenc.keras.rotary import RotaryEmbedding

MASKED_SCORE = -1e30
"""Value of a masked score: finite, so that a row with only masked keys has finite gradients."""


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
    Units: distances in tokens. Precision: float32.
    Raises: ValueError if max_distance < 1; TypeError for real positions.
    Source: Shaw et al. 2018, arXiv:1803.02155, equations 3-5.

    >>> import keras
    >>> attention = posenc.keras.ShawAttention(max_distance=4)
    >>> query, key = keras.ops.ones((2, 10, 8, 16)), keras.ops.ones((2, 12, 4, 16))
    >>> out = attention(query, key, key, start_index=2)  # the queries come last
    >>> out.shape == query.shape, attention.key_table.shape == (9, 16)
    (True, True)
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

    def table_row(self, distance: Any) -> Any:
        """Return the row of the tables for each distance (positive: the past)."""
        return self.max_distance - ops.clip(distance, -self.max_distance, self.max_distance)

    def attend(self, query: Any, key: Any, value: Any, row_index: Any, mask: Any) -> Any:
        """Return the output of attention, like query.

        row_index: the row of the tables for each pair, (q_len, kv_len) or (batch, q_len, kv_len).
        query, key, value and mask are as in the class.
        """
        queries_per_key_head = query.shape[2] // key.shape[2]
        q, k, v = (
            at_least_float32(query),
            *(ops.repeat(at_least_float32(x), queries_per_key_head, axis=2) for x in (key, value)),
        )
        q = q * q.shape[-1] ** -0.5
        row_index = row_index if len(row_index.shape) == 2 else ops.expand_dims(row_index, 1)
        scores = ops.einsum("bqhd,bkhd->bhqk", q, k)
        scores_by_row = ops.einsum("bqhd,rd->bhqr", q, at_least_float32(self.key_table))
        scores = scores + _gather_by_row(scores_by_row, row_index)
        weights = masked_softmax(scores, mask)
        out = ops.einsum("bhqk,bkhd->bqhd", weights, v)
        if self.values:  # sum weights by row, without a tensor of q_len x kv_len x rows
            rows = range(2 * self.max_distance + 1)
            weights_by_row = [
                ops.sum(ops.where(row_index == r, weights, 0.0), axis=-1) for r in rows
            ]
            value_table = at_least_float32(self.value_table)
            out = out + ops.einsum("bhqr,rd->bqhd", ops.stack(weights_by_row, axis=-1), value_table)
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
        row_index = self.table_row(distances(q_positions, kv_positions))
        return self.attend(query, key, value, row_index, attention_mask)


def _gather_by_row(table: Any, row_index: Any) -> Any:
    """Return table[..., i, row[..., i, j]] for each pair (i, j), (..., q_len, kv_len): table (...,
    q_len, rows), row (..., q_len, kv_len).

    take_along_axis would make torch compile once per length.
    """
    num_rows, shape = table.shape[-1], ops.shape(table)[:-1]  # some are tensors under TensorFlow
    first_of_row = ops.arange(math.prod(shape), dtype="int32") * num_rows
    flat_index = ops.reshape(first_of_row, (*shape, 1)) + ops.cast(row_index, "int32")
    return ops.take(ops.reshape(table, (-1,)), flat_index)


def masked_softmax(scores: Any, mask: Any) -> Any:
    """Return the softmax of scores over the keys for which `mask` is True; zeros for a query that
    sees no key. mask=None shows all keys."""
    if mask is None:
        return ops.softmax(scores, axis=-1)
    mask = ops.cast(mask, "bool")
    weights = ops.softmax(ops.where(mask, scores, MASKED_SCORE), axis=-1)
    return ops.where(mask, weights, 0.0)


Encoding = RotaryEmbedding | ScoreBias | ShawAttention


@keras.saving.register_keras_serializable(package="posenc")
class PositionAwareAttention(PositionLayer):
    """Project to queries, keys and values, attend with a position encoding, project back.

    out = o_proj(softmax(scale * q . k + bias) v), source of k and v: the context, or x itself

    Args:
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads; None means num_heads.
        encoding: RotaryEmbedding, ALiBi, T5RelativeBias, KerpleBias, ShawAttention or None. Several
            attention layers may share one object, as in T5; see the README of posenc.keras on
            saving. An encoding of the embeddings is a layer before this one.
        head_dim: size of one head; None means the input's width / num_heads.
        use_bias: True if the projections have a bias.

    Call: x (batch, q_len, embed_dim) -> the same; context (batch, kv_len, any) to attend to instead
    of x; positions and context_positions (len) or (batch, len), by default counted from start_index
    and from 0; attention_mask (batch, q_len, kv_len), (q_len, kv_len) or (batch, num_heads, q_len,
    kv_len), True for visible keys; use_causal_mask hides keys at later positions than the query's;
    length as for RotaryEmbedding. Keras passes the padding masks of x and context, (batch, len), by
    itself: as mask if x is the only tensor, otherwise as x_mask and context_mask. A query that sees
    no key gets zeros before o_proj.
    Precision: scores with a bias in float32.
    Raises: ValueError if heads do not fit; TypeError for an encoding that attention cannot use.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        encoding: Any = None,
        *,
        head_dim: int | None = None,
        use_bias: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                "PositionAwareAttention: num_kv_heads must divide num_heads, "
                f"got {num_kv_heads} and {num_heads}."
            )
        encoding = restore_layer(encoding)
        if encoding is not None and not isinstance(encoding, Encoding):
            raise TypeError(
                "PositionAwareAttention: encoding must be a RotaryEmbedding, ALiBi, "
                "T5RelativeBias, KerpleBias, ShawAttention or None, "
                f"got {type(encoding).__name__}. Encodings of the embeddings come before attention."
            )
        if isinstance(encoding, ScoreBias) and encoding.num_heads != num_heads:
            raise ValueError(
                f"PositionAwareAttention: the encoding is for {encoding.num_heads} heads, "
                f"num_heads is {num_heads}."
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.encoding = encoding
        self.head_dim = head_dim
        self.use_bias = use_bias

    # Keras passes shapes by the names of call's arguments; its base class declares another name.
    def build(self, x_shape, context_shape=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        embed_dim = x_shape[-1]
        source_shape = x_shape if context_shape is None else context_shape
        if self.head_dim is None and embed_dim % self.num_heads:
            raise ValueError(
                f"PositionAwareAttention: num_heads={self.num_heads} must divide the input's width "
                f"{embed_dim}, or head_dim be given."
            )
        self._head_width = embed_dim // self.num_heads if self.head_dim is None else self.head_dim
        num_heads_by_projection = {
            "q_proj": self.num_heads,
            "k_proj": self.num_kv_heads,
            "v_proj": self.num_kv_heads,
        }
        for name, num_heads in num_heads_by_projection.items():
            setattr(self, name, self._make_projection(name, num_heads * self._head_width))
            getattr(self, name).build(x_shape if name == "q_proj" else source_shape)
        self.o_proj = self._make_projection("o_proj", embed_dim)
        self.o_proj.build((*x_shape[:-1], self.num_heads * self._head_width))
        if self.encoding is not None and not self.encoding.built:
            self.encoding.build((*x_shape[:-1], self.num_heads, self._head_width))

    def _make_projection(self, name: str, width: int) -> keras.layers.Dense:
        """Return a new dense layer with `width` output channels and this name."""
        return keras.layers.Dense(width, use_bias=self.use_bias, name=name, dtype=self.dtype_policy)

    def call(
        self,
        x,
        context=None,
        positions=None,
        context_positions=None,
        attention_mask=None,
        use_causal_mask=False,
        start_index=0,
        length=None,
        mask=None,
        x_mask=None,
        context_mask=None,
    ):
        q_positions = token_positions(self.name, ops.shape(x)[1], positions, start_index)
        if context is None:
            if context_positions is not None:
                raise ValueError(
                    "PositionAwareAttention: context_positions were given without a context."
                )
            source = x
            kv_positions = q_positions
            valid_keys = x_mask if mask is None else mask
        else:
            source = context
            valid_keys = context_mask
            kv_positions = token_positions(self.name, ops.shape(source)[1], context_positions, 0)
        if length is not None and not isinstance(self.encoding, RotaryEmbedding):
            raise ValueError("PositionAwareAttention: length is for a RotaryEmbedding.")
        q = self._split_heads(self.q_proj(x), self.num_heads)
        k = self._split_heads(self.k_proj(source), self.num_kv_heads)
        v = self._split_heads(self.v_proj(source), self.num_kv_heads)
        visible = self._combine_masks(
            attention_mask, valid_keys, use_causal_mask, q_positions, kv_positions
        )
        if isinstance(self.encoding, ShawAttention):
            out = self.encoding(
                q, k, v, q_positions=q_positions, kv_positions=kv_positions, attention_mask=visible
            )
        else:
            if isinstance(self.encoding, RotaryEmbedding):
                cos_sin = self.encoding.cos_sin(q_positions, length)
                q = self.encoding.rotate(q, *cos_sin)
                if context is not None:  # keys at other positions than the queries
                    cos_sin = self.encoding.cos_sin(kv_positions, length)
                k = self.encoding.rotate(k, *cos_sin)
            out = self._attend(q, k, v, q_positions, kv_positions, visible)
        return self.o_proj(
            ops.reshape(out, (-1, ops.shape(x)[1], self.num_heads * self._head_width))
        )

    def _attend(
        self, q: Any, k: Any, v: Any, q_positions: Any, kv_positions: Any, visible: Any
    ) -> Any:
        """Return softmax(scale * q . k + bias) v, (batch, q_len, num_heads, head_dim), for queries
        and keys that are rotated already; zeros for a query that sees no key.

        q, k, v: (batch, len, heads, head_dim). visible: all masks combined, as `_combine_masks`
        returns them, True for visible keys; None if there are none.
        """
        bias = None
        if isinstance(self.encoding, ScoreBias):
            bias = self.encoding.bias(q_positions, kv_positions)
            bias = bias if len(bias.shape) == 4 else ops.expand_dims(bias, 0)
            if getattr(self.encoding, "form", None) == "left_right":
                # Its bias is -inf at hidden keys; those become part of the mask.
                is_in_view = bias > MASKED_SCORE
                visible = is_in_view if visible is None else ops.logical_and(visible, is_in_view)
            # The dtype of q, k and v would round the bias.
            q = at_least_float32(q)
            k = at_least_float32(k)
            v = at_least_float32(v)
        if visible is not None:
            bias = ops.where(visible, 0.0 if bias is None else bias, MASKED_SCORE)
            q = at_least_float32(q)
            k = at_least_float32(k)
            v = at_least_float32(v)
        scale = (
            self._head_width**-0.5
            if self.encoding is None
            else self.encoding.scale(self._head_width)
        )
        if keras.backend.backend() == "tensorflow" and k.shape[2] != q.shape[2]:
            # Keras' attention on TensorFlow does not support grouped queries.
            k, v = (ops.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        # Flash attention takes no bias. torch chooses its kernel itself, and Keras' asking for it
        # would break a compiled graph.
        flash_attention = None if bias is None and keras.backend.backend() != "torch" else False
        out = ops.dot_product_attention(
            q, k, v, bias=bias, scale=scale, flash_attention=flash_attention
        )
        if visible is not None:
            sees_some_key = ops.moveaxis(ops.any(visible, axis=-1, keepdims=True), 1, 2)
            out = ops.where(sees_some_key, out, 0.0)
        return self.to_compute_dtype(out)

    def _combine_masks(
        self, mask: Any, valid_keys: Any, causal: bool, q_positions: Any, kv_positions: Any
    ) -> Any:
        """Return all masks combined, True for visible keys, in a shape that broadcasts to (batch,
        num_heads, q_len, kv_len); None if there are none.

        mask: the layer's attention_mask, or None. valid_keys: (batch, kv_len), True for keys that
        are no padding, or None. causal: True to hide keys at later positions than the query's.
        """
        visible_by_mask = []
        if mask is not None:
            mask = ops.cast(mask, "bool")
            new_axes = {2: (None, None), 3: (slice(None), None), 4: ()}.get(len(mask.shape))
            if new_axes is None:
                raise ValueError(
                    "PositionAwareAttention: attention_mask must be (q_len, kv_len), with a batch "
                    f"or also heads before, got shape {tuple(mask.shape)}."
                )
            visible_by_mask.append(mask[new_axes] if new_axes else mask)
        if valid_keys is not None:
            visible_by_mask.append(ops.cast(valid_keys, "bool")[:, None, None, :])
        if causal:
            is_past = distances(q_positions, kv_positions) >= 0
            visible_by_mask.append(
                is_past[None, None] if len(is_past.shape) == 2 else is_past[:, None]
            )
        return functools.reduce(ops.logical_and, visible_by_mask) if visible_by_mask else None

    def _split_heads(self, x: Any, num_heads: int) -> Any:
        """Return x (batch, len, count * head_dim) as (batch, len, count, head_dim)."""
        return ops.reshape(x, (-1, ops.shape(x)[1], num_heads, self._head_width))

    def compute_output_shape(self, x_shape, context_shape=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        return x_shape
