"""What all layers here share: numbers in float32 whatever the policy, and positions."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class PositionLayer(keras.layers.Layer):
    """A layer that computes in at least float32 and rounds once, to the policy's compute dtype.

    Keras would cast every real input and weight to bfloat16 under mixed_bfloat16, positions among
    them; here nothing is cast but the result.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape):
        return input_shape

    def add_float_weight(self, name: str, shape: tuple[int, ...], initializer: Any) -> Any:
        """A weight that mixed policies leave as it is."""
        return self.add_weight(name=name, shape=shape, initializer=initializer, autocast=False)

    def rounded(self, x: Any) -> Any:
        """x in the policy's compute dtype."""
        return ops.cast(x, self.compute_dtype)


def wide(x: Any) -> Any:
    """x in float32, or float64 where it is."""
    x = ops.convert_to_tensor(x)
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")


def token_positions(name: str, length: int, positions: Any, start_index: Any) -> Any:
    """`positions` as a tensor, or start_index, start_index + 1, ... where they are None."""
    if positions is None:
        return ops.arange(length, dtype="int32") + ops.cast(start_index, "int32")
    if not (isinstance(start_index, int) and start_index == 0):
        raise ValueError(f"{name}: give positions or start_index, not both.")
    positions = ops.convert_to_tensor(positions)
    if len(positions.shape) not in (1, 2):
        raise ValueError(
            f"{name}: positions must be (len) or (batch, len), got shape {tuple(positions.shape)}."
        )
    return positions


def require_whole(name: str, *positions: Any) -> None:
    """Raise TypeError for real positions where a table has a row per whole one."""
    for p in positions:
        if "int" not in keras.backend.standardize_dtype(p.dtype):
            raise TypeError(f"{name}: positions must be integers, got {p.dtype}.")


def distances(q_positions: Any, kv_positions: Any) -> Any:
    """Query position minus key position, (q_len, kv_len) or (batch, q_len, kv_len)."""
    return ops.expand_dims(q_positions, -1) - ops.expand_dims(kv_positions, -2)


def serialized(layer: Any) -> Any:
    """A layer given to a constructor, for `get_config`."""
    return None if layer is None else keras.saving.serialize_keras_object(layer)


def deserialized(layer: Any) -> Any:
    """The layer, where `get_config` gave its config."""
    return keras.saving.deserialize_keras_object(layer) if isinstance(layer, dict) else layer
