"""Base class and helpers of all layers: float32 under every dtype policy, positions, configs."""

import inspect
from typing import Any

import keras
import numpy as np
from keras.src.backend import in_symbolic_scope

ops: Any = keras.ops
"""keras.ops as Any, because its annotated types (tensor or None) support no operator."""


class PositionLayer(keras.layers.Layer):
    """Base class of all layers: compute in at least float32 and round once, to the compute dtype.

    Under mixed_bfloat16 Keras would cast all floating-point inputs and weights to bfloat16, even
    positions. Here only the result is cast.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self.supports_masking = True

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructors, read from the attributes of the same names."""
        kinds = type(self).__mro__
        arguments = {
            name: serialize_argument(getattr(self, name))
            for kind in reversed(kinds[: kinds.index(PositionLayer)])
            for name in inspect.signature(kind.__init__).parameters
            if hasattr(self, name)
        }
        return {**super().get_config(), **arguments}

    def add_float_weight(self, name: str, shape: tuple[int, ...], initializer: Any) -> Any:
        """Add a weight that mixed dtype policies do not cast, and return it."""
        return self.add_weight(name=name, shape=shape, initializer=initializer, autocast=False)

    def to_compute_dtype(self, x: Any) -> Any:
        """Cast x to the compute dtype of the dtype policy."""
        return ops.cast(x, self.compute_dtype)


def at_least_float32(x: Any) -> Any:
    """Convert x to float32, or keep float64."""
    x = ops.convert_to_tensor(x)
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")


def token_positions(name: str, length: Any, positions: Any, start_index: Any) -> Any:
    """Return the positions of `length` tokens as a tensor: `positions`, checked, or start_index,
    start_index + 1, ... if they are None.

    name: the layer's, for messages. length: from ops.shape; an int, or a tensor where TensorFlow
    does not know the length yet.
    Raises: ValueError for a wrong shape, or if positions and start_index are both given.
    """
    if positions is None:
        return ops.arange(length, dtype="int32") + ops.cast(start_index, "int32")
    if not (isinstance(start_index, int) and start_index == 0):
        raise ValueError(f"{name}: give positions or start_index, not both.")
    positions = ops.convert_to_tensor(positions)
    shape = tuple(positions.shape)
    other = shape and isinstance(length, int) and shape[-1] not in (length, None)
    if len(shape) not in (1, 2) or other:
        raise ValueError(
            f"{name}: positions must be (len) or (batch, len) with len {length}, got shape {shape}."
        )
    return positions


def require_integers(name: str, *positions: Any) -> None:
    """Raise TypeError if positions are real numbers, for layers with a table of positions."""
    for p in positions:
        if "int" not in keras.backend.standardize_dtype(p.dtype):
            raise TypeError(f"{name}: positions must be integers, got {p.dtype}.")


def is_inferring_shapes() -> bool:
    """Return True while Keras infers the shapes of outputs, from inputs whose lengths it makes
    up."""
    return in_symbolic_scope()


def numbers_if_readable(positions: Any) -> np.ndarray | None:
    """Return the positions as a NumPy array, which waits for an accelerator; None while they are
    traced."""
    if is_inferring_shapes():
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


def serialize_argument(argument: Any) -> Any:
    """Return a constructor's argument in the form that `get_config` stores: a dict for an
    initializer or a layer, anything else unchanged.

    The id of a layer lets Keras restore one object for all layers that shared it. Keras adds the
    same id, but after it has copied the config of the first of them.
    """
    if isinstance(argument, keras.initializers.Initializer):
        return keras.initializers.serialize(argument)
    if not isinstance(argument, keras.layers.Layer):
        return argument
    config: Any = keras.saving.serialize_keras_object(argument)
    return {**config, "shared_object_id": id(argument)}


def restore_layer(layer: Any) -> Any:
    """Return the layer of a dict that `serialize_argument` made; return anything else unchanged."""
    return keras.saving.deserialize_keras_object(layer) if isinstance(layer, dict) else layer
