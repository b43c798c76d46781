"""Score biases that depend only on the distance."""

from typing import Any

import keras
import numpy as np

from posenc.encodings.numerics.slopes_and_buckets import (
    KERPLE_INITIAL_MAX,
    KERPLE_MIN,
    KERPLE_POWER_MAX,
    alibi_slopes_and_sides,
    t5_bucket_edges,
)
from posenc.keras.position_layer import (
    PositionLayer,
    at_least_float32,
    distances,
    ops,
    token_positions,
)


class ScoreBias(PositionLayer):
    """Base class of layers that add a bias by distance to attention scores; a subclass defines
    `bias_of_distance`.

    Call: scores (batch, num_heads, q_len, kv_len), q_positions (q_len) or (batch, q_len), by
    default counted from start_index, kv_positions (kv_len) or (batch, kv_len), by default counted
    from 0 -> like scores.
    """

    num_heads: int

    def __init__(self, num_heads: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if num_heads < 1:
            raise ValueError(f"{type(self).__name__}: num_heads must be >= 1, got {num_heads}.")
        self.num_heads = num_heads

    def scale(self, head_dim: int) -> float:
        """Return the factor of q . k in the scores."""
        return head_dim**-0.5

    def bias_of_distance(self, distance: Any) -> Any:
        """Return the bias of each distance in float32: (..., num_heads, q_len, kv_len) for
        distances (..., q_len, kv_len). A subclass defines it."""
        raise NotImplementedError

    def bias(self, q_positions: Any, kv_positions: Any) -> Any:
        """Return the bias of each pair, float32 (num_heads, q_len, kv_len), or (batch, num_heads,
        q_len, kv_len) if positions are batched."""
        return self.bias_of_distance(distances(q_positions, kv_positions))

    def call(self, scores, q_positions=None, kv_positions=None, start_index=0):
        q_positions = token_positions(self.name, scores.shape[2], q_positions, start_index)
        kv_positions = token_positions(self.name, scores.shape[3], kv_positions, 0)
        return self.to_compute_dtype(
            at_least_float32(scores) + self.bias(q_positions, kv_positions)
        )


@keras.saving.register_keras_serializable(package="posenc")
class ALiBi(ScoreBias):
    """Add a penalty that grows linearly with distance to the attention scores.

    score[h, i, j] += -slope[h] * |position_i - position_j|

    Args:
        num_heads: number of query heads.
        form: "symmetric", or "left_right" for encoders: half of the heads see the past, the others
            the future (-inf elsewhere).
        learned: train the slopes, stored as logarithms, from the paper's values.
        bias_max: the exponent of the last slope of a power of two heads.

    Call: see ScoreBias. Precision: float32 from the distance.
    Raises: ValueError if the form does not fit the heads.
    Source: Press et al. 2022, arXiv:2108.12409, section 3.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        form: str = "symmetric",
        learned: bool = False,
        bias_max: float = 8.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, **kwargs)
        if form not in ("symmetric", "left_right"):
            raise ValueError(f"ALiBi: form must be 'symmetric' or 'left_right', got {form!r}.")
        if form == "left_right" and num_heads % 2:
            raise ValueError(f"ALiBi: form='left_right' needs an even num_heads, got {num_heads}.")
        self.form = form
        self.learned = learned
        self.bias_max = bias_max
        self.slopes, self._sides = alibi_slopes_and_sides(num_heads, form == "left_right", bias_max)

    def build(self, input_shape) -> None:
        if self.learned:
            self.log_slopes = self.add_float_weight(
                "log_slopes", (self.num_heads,), self._initial_log_slopes
            )

    def _initial_log_slopes(self, shape: Any, dtype: Any = None) -> Any:
        """Return the logarithms of the paper's slopes, (num_heads,). An initializer: Keras calls it
        with `shape`, which is not needed."""
        return ops.convert_to_tensor(np.log(self.slopes), dtype)

    def bias_of_distance(self, distance: Any) -> Any:
        signed_distance = ops.expand_dims(ops.cast(distance, "float32"), -3)
        slopes = (
            ops.exp(at_least_float32(self.log_slopes))
            if self.learned
            else ops.convert_to_tensor(self.slopes, "float32")
        )
        bias = -slopes[:, None, None] * ops.abs(signed_distance)
        if self.form == "symmetric":
            return bias
        sides = ops.convert_to_tensor(self._sides, "float32")[:, None, None]
        return ops.where(sides * signed_distance < 0, -float("inf"), bias)


@keras.saving.register_keras_serializable(package="posenc")
class T5RelativeBias(ScoreBias):
    """Add a learned bias per head and distance bucket to the attention scores.

    score[h, i, j] += weight[bucket(position_i - position_j), h]

    In T5 all attention layers share one bias: give them the same object.

    Args:
        num_heads: number of query heads.
        bidirectional: half of the buckets for each direction; False: the past only.
        num_buckets: rows of the table.
        max_distance: end of the logarithmic buckets, in tokens.
        init_std: standard deviation of the initial values.
        unscaled: the scale of q . k is 1, as in T5, instead of 1/sqrt(head_dim).

    Call: see ScoreBias. weight (num_buckets, num_heads). Precision: exact bucket edges.
    Raises: ValueError for invalid buckets.
    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        bidirectional: bool = False,
        num_buckets: int = 32,
        max_distance: int = 128,
        init_std: float = 0.02,
        unscaled: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(num_heads, **kwargs)
        self.bidirectional = bidirectional
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.init_std = init_std
        self.unscaled = unscaled
        self._edges = t5_bucket_edges(num_buckets, max_distance, bidirectional, "T5RelativeBias")

    def build(self, input_shape) -> None:
        initializer = keras.initializers.RandomNormal(stddev=self.init_std)
        self.weight = self.add_float_weight(
            "weight", (self.num_buckets, self.num_heads), initializer
        )

    def scale(self, head_dim: int) -> float:
        return 1.0 if self.unscaled else super().scale(head_dim)

    def bucket(self, distance: Any) -> Any:
        """Return the row of the table for each distance (positive: the past)."""
        unsigned_distance = ops.abs(distance) if self.bidirectional else ops.maximum(distance, 0)
        edges = ops.convert_to_tensor(self._edges, unsigned_distance.dtype)
        # Flat: TensorFlow searches one row of edges only for one row of values.
        bucket_index = ops.searchsorted(edges, ops.reshape(unsigned_distance, (-1,)), side="right")
        bucket_index = ops.reshape(bucket_index, ops.shape(unsigned_distance))
        if not self.bidirectional:
            return bucket_index
        return bucket_index + (len(self._edges) + 1) * ops.cast(distance < 0, bucket_index.dtype)

    def bias_of_distance(self, distance: Any) -> Any:
        bias_heads_last = ops.take(at_least_float32(self.weight), self.bucket(distance), axis=0)
        return ops.moveaxis(bias_heads_last, -1, -3)


@keras.saving.register_keras_serializable(package="posenc")
class KerpleBias(ScoreBias):
    """Add a learned kernel of the distance to the attention scores.

    form="log":   score[h, i, j] += -r1[h] * ln(1 + r2[h] * |position_i - position_j|)
    form="power": score[h, i, j] += -r1[h] * |position_i - position_j|^r2[h]

    Args:
        num_heads: number of query heads.
        form: "log" or "power".

    Call: see ScoreBias. r1, r2 (num_heads), clamped to at least 0.01, and r2 of "power" to at most
    2. Precision: float32.
    Raises: ValueError for an unknown form.
    Source: Chi et al. 2022, arXiv:2205.09921, section 4.
    """

    def __init__(self, num_heads: int, *, form: str = "log", **kwargs: Any) -> None:
        super().__init__(num_heads, **kwargs)
        if form not in KERPLE_INITIAL_MAX:
            raise ValueError(f"KerpleBias: form must be 'log' or 'power', got {form!r}.")
        self.form = form

    def build(self, input_shape) -> None:
        self.r1, self.r2 = (
            self.add_float_weight(
                name, (self.num_heads,), keras.initializers.RandomUniform(0.0, high)
            )
            for name, high in zip(("r1", "r2"), KERPLE_INITIAL_MAX[self.form], strict=True)
        )

    def bias_of_distance(self, distance: Any) -> Any:
        distance = ops.expand_dims(ops.abs(ops.cast(distance, "float32")), -3)
        r1 = _clamp_keeping_gradient(self.r1)
        if self.form == "log":
            return -r1 * ops.log1p(_clamp_keeping_gradient(self.r2) * distance)
        return -r1 * distance ** _clamp_keeping_gradient(self.r2, KERPLE_POWER_MAX)


def _clamp_keeping_gradient(weight: Any, high: float = float("inf")) -> Any:
    """Return the weight (num_heads,) clamped to [KERPLE_MIN, high], as (num_heads, 1, 1), with a
    gradient as if it were not clamped: see posenc.encodings.scores.kerple."""
    unclamped = at_least_float32(weight)
    return (unclamped + ops.stop_gradient(ops.clip(unclamped, KERPLE_MIN, high) - unclamped))[
        :, None, None
    ]
