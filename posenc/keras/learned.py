"""Learned absolute position embeddings, which can be extended beyond their table."""

from typing import Any

import keras

from posenc.encodings.numerics.slopes_and_buckets import check_hierarchical, rows_to_interpolate
from posenc.keras.position_layer import (
    PositionLayer,
    at_least_float32,
    is_inferring_shapes,
    numbers_if_readable,
    ops,
    require_integers,
    token_positions,
)

GROWTHS = (None, "interpolate", "hierarchical")


@keras.saving.register_keras_serializable(package="posenc")
class LearnedPositionEmbedding(PositionLayer):
    """Add one learned vector per position to the embeddings.

    x[p] += weight[p], or with `growth` a combination of rows of weight

    The weights of a layer trained without growth fit one with growth (`set_weights`, or
    `load_weights` of a model with the same layers), which can be trained further.

    Args:
        max_positions: rows of the table.
        growth: None; "interpolate": read between the rows; "hierarchical": Su's two digits in base
            max_positions, which keep the first rows unchanged (encodings.embeddings.grow).
        num_positions: number of positions with growth; without it, max_positions.
        align_corners: required for "interpolate", see encodings.embeddings.grow.
        alpha: for "hierarchical", the weight of the higher digit.
        initializer: initializer of the table; None means normal with a standard deviation of 0.02.

    Call: x (batch, seq_len, embed_dim), whole positions (seq_len) or (batch, seq_len), by default
    start_index, start_index + 1, ... -> like x. weight (max_positions, embed_dim).
    Precision: added in float32.
    Raises: ValueError for options that do not fit, and for positions outside of the table. In
    compiled code these are not checked and give NaN. Otherwise the check waits for an accelerator.
    Source: Devlin et al. 2019, arXiv:1810.04805; Su 2020, kexue.fm/archives/7947 for the hierarchy.
    """

    def __init__(
        self,
        max_positions: int,
        *,
        growth: str | None = None,
        num_positions: int | None = None,
        align_corners: bool | None = None,
        alpha: float = 0.4,
        initializer: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_positions < 1:
            raise ValueError(
                f"LearnedPositionEmbedding: max_positions must be at least 1, got {max_positions}."
            )
        if growth not in GROWTHS:
            raise ValueError(
                f"LearnedPositionEmbedding: growth must be one of {GROWTHS}, got {growth!r}."
            )
        if (growth is None) != (num_positions is None):
            raise ValueError(
                "LearnedPositionEmbedding: growth and num_positions go together, "
                f"got growth={growth!r} and num_positions={num_positions}."
            )
        if (growth == "interpolate") != (align_corners is not None):
            raise ValueError(
                "LearnedPositionEmbedding: growth='interpolate', and only it, needs align_corners "
                f"True or False, got growth={growth!r} and align_corners={align_corners}."
            )
        self.max_positions = max_positions
        self.growth = growth
        self.align_corners = align_corners
        self.num_positions = num_positions
        self.alpha = alpha
        # The positions that the layer has a vector for: 0 to num_usable_positions - 1.
        self.num_usable_positions = max_positions if num_positions is None else num_positions
        if self.num_usable_positions < 1:
            raise ValueError(
                "LearnedPositionEmbedding: num_positions must be at least 1, "
                f"got {self.num_usable_positions}."
            )
        if growth == "hierarchical":
            check_hierarchical(max_positions, self.num_usable_positions, alpha)
        if align_corners is not None:
            self._source_rows = rows_to_interpolate(
                max_positions, self.num_usable_positions, align_corners
            )
        if initializer is None:
            initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.initializer = keras.initializers.get(initializer)

    def build(self, input_shape) -> None:
        shape = (self.max_positions, input_shape[-1])
        self.weight = self.add_float_weight("weight", shape, self.initializer)

    def vectors(self, positions: Any) -> Any:
        """Return the vector to add at each position, (*positions.shape, embed_dim)."""
        positions = ops.convert_to_tensor(positions)
        require_integers("LearnedPositionEmbedding", positions)
        numbers = numbers_if_readable(positions)
        if numbers is not None and numbers.size:
            self._check_inside_table(int(numbers.min()), int(numbers.max()))
        return self._vectors_at(positions)

    def _check_inside_table(self, first: int, last: int) -> None:
        """Raise ValueError unless the layer has vectors for the positions `first` to `last`."""
        if first < 0 or last >= self.num_usable_positions:
            raise ValueError(
                "LearnedPositionEmbedding: positions must be 0 to "
                f"{self.num_usable_positions - 1}, got {first} to {last}. "
                "Use growth and num_positions, or shorten the input."
            )

    def _vectors_at(self, positions: Any) -> Any:
        """Return the vector to add at each position, NaN at positions outside of the table."""
        inside = (positions >= 0) & (positions < self.num_usable_positions)
        index = ops.clip(positions, 0, self.num_usable_positions - 1)
        weight = at_least_float32(self.weight)
        if self.growth is None:
            rows = ops.take(weight, index, axis=0)
        elif self.growth == "interpolate":
            lower, upper, share = self._source_rows
            rows = (ops.convert_to_tensor(r, "int32") for r in (lower, upper))
            low, high = (ops.take(weight, ops.take(r, index), axis=0) for r in rows)
            share = ops.take(ops.convert_to_tensor(share, weight.dtype), index)[..., None]
            rows = (1 - share) * low + share * high
        else:
            digit = (weight - self.alpha * weight[:1]) / (1 - self.alpha)
            high = ops.take(digit, index // self.max_positions, axis=0)
            low = ops.take(digit, index % self.max_positions, axis=0)
            rows = self.alpha * high + (1 - self.alpha) * low
        return ops.where(ops.expand_dims(inside, -1), rows, float("nan"))

    def embed(self, x: Any, positions: Any, start_index: Any) -> Any:
        """Return x with the embeddings added, not yet rounded to the compute dtype. positions=None
        means start_index, start_index + 1, ..."""
        length = ops.shape(x)[1]
        callers_positions = positions
        positions = token_positions(self.name, length, positions, start_index)
        if callers_positions is not None or not isinstance(start_index, int):
            return at_least_float32(x) + self.vectors(positions)
        if isinstance(length, int) and not is_inferring_shapes():  # jax's symbolic length is no int
            self._check_inside_table(start_index, start_index + length - 1)
        return at_least_float32(x) + self._vectors_at(positions)

    def call(self, x, positions=None, start_index=0):
        return self.to_compute_dtype(self.embed(x, positions, start_index))
