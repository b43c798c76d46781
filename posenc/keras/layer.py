"""Shared by all layers: float32 under every policy, and positions."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
from keras.src.backend import in_symbolic_scope

ops: Any = keras.ops
"""Keras' operations. Its own types say "any backend's tensor or None" of each result, which no
operator takes."""


class PositionLayer(keras.layers.Layer):
    """A layer that computes in at least float32 and rounds once, to the policy's compute dtype.

    Under mixed_bfloat16 Keras would cast every floating input and weight to bfloat16, positions
    too; here only the result is cast.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Return the constructors' arguments, each from the attribute of its name."""
        kinds = type(self).__mro__
        arguments = {
            name: serialized(getattr(self, name))
            for kind in reversed(kinds[: kinds.index(PositionLayer)])
            for name in inspect.signature(kind.__init__).parameters
            if hasattr(self, name)
        }
        return {**super().get_config(), **arguments}

    def add_float_weight(self, name: str, shape: tuple[int, ...], initializer: Any) -> Any:
        """Add a weight that mixed policies do not cast."""
        return self.add_weight(name=name, shape=shape, initializer=initializer, autocast=False)

    def rounded(self, x: Any) -> Any:
        """Cast x to the policy's compute dtype."""
        return ops.cast(x, self.compute_dtype)


def wide(x: Any) -> Any:
    """Convert x to float32, or keep float64."""
    x = ops.convert_to_tensor(x)
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")


def token_positions(name: str, length: Any, positions: Any, start_index: Any) -> Any:
    """Return `positions` as a tensor, or start_index, start_index + 1, ... if they are None.
    `length` comes from ops.shape, which is a tensor in TensorFlow where the length is unknown."""
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
    """Raise TypeError for real positions, for which a table has no row."""
    for p in positions:
        if "int" not in keras.backend.standardize_dtype(p.dtype):
            raise TypeError(f"{name}: positions must be integers, got {p.dtype}.")


def only_shapes() -> bool:
    """True if Keras asks only for shapes, with lengths of its own choice."""
    return in_symbolic_scope()


def known(positions: Any) -> np.ndarray | None:
    """Return a tensor's elements, which makes an accelerator wait; None while it is traced."""
    if only_shapes():
        return None
    backend = keras.backend.backend()
    if backend == "jax":
        from jax.core import Tracer

        traced = isinstance(positions, Tracer)
    elif backend == "torch":
        import torch

        traced = torch.compiler.is_compiling()
    else:
        traced = not hasattr(positions, "numpy")
    return None if traced else ops.convert_to_numpy(positions)


def distances(q_positions: Any, kv_positions: Any) -> Any:
    """Return query position minus key position, (q_len, kv_len) or (batch, q_len, kv_len)."""
    return ops.expand_dims(q_positions, -1) - ops.expand_dims(kv_positions, -2)


def serialized(argument: Any) -> Any:
    """Serialize a constructor's argument for `get_config`.

    The mark of a layer lets Keras restore one object where several layers were given the same one.
    Keras sets the same mark, but too late for the first occurrence, whose config is already copied.
    """
    if isinstance(argument, keras.initializers.Initializer):
        return keras.initializers.serialize(argument)
    if not isinstance(argument, keras.layers.Layer):
        return argument
    config: Any = keras.saving.serialize_keras_object(argument)
    return {**config, "shared_object_id": id(argument)}


def deserialized(layer: Any) -> Any:
    """Restore a layer from its config."""
    return keras.saving.deserialize_keras_object(layer) if isinstance(layer, dict) else layer
