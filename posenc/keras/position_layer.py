"""Base class and helpers of all layers: float32 under every dtype policy, positions, configs, and
cos and sin in 32-bit arithmetic, alike on all backends."""

import inspect
import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import keras
import numpy as np
from keras.src.backend import in_symbolic_scope

from posenc.frequencies.series import DIGIT_BITS, PART_BITS, digit_turns

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
        """Return the arguments of the constructors of the layer's class and its bases, read from
        attributes of the same names."""
        classes = type(self).__mro__
        arguments = {
            name: serialize_argument(getattr(self, name))
            for base_class in reversed(classes[: classes.index(PositionLayer)])
            for name in inspect.signature(base_class.__init__).parameters
            if hasattr(self, name)
        }
        return {**super().get_config(), **arguments}

    def add_float_weight(self, name: str, shape: tuple[int, ...], initializer: Any) -> Any:
        """Add a weight and return it. It stays in its own dtype under a mixed dtype policy, which
        would cast it."""
        return self.add_weight(name=name, shape=shape, initializer=initializer, autocast=False)

    def to_compute_dtype(self, x: Any) -> Any:
        """Return x in the compute dtype of the layer's dtype policy."""
        return ops.cast(x, self.compute_dtype)


def at_least_float32(x: Any) -> Any:
    """Return x in float32, or in float64 if that is its dtype."""
    x = ops.convert_to_tensor(x)
    return x if keras.backend.standardize_dtype(x.dtype) == "float64" else ops.cast(x, "float32")


def token_positions(name: str, length: Any, positions: Any, start_index: Any) -> Any:
    """Return the positions of `length` tokens as a tensor: `positions`, checked, or if that is None
    start_index, start_index + 1, ...

    name: name of the layer, for messages. length: from ops.shape: an int, or a tensor where
    TensorFlow does not know the length yet.
    Raises: ValueError for a wrong shape, or if positions and start_index are both given.
    """
    if positions is None:
        return ops.arange(length, dtype="int32") + ops.cast(start_index, "int32")
    if not (isinstance(start_index, int) and start_index == 0):
        raise ValueError(f"{name}: give positions or start_index, not both.")
    positions = ops.convert_to_tensor(positions)
    shape = tuple(positions.shape)
    has_other_length = shape and isinstance(length, int) and shape[-1] not in (length, None)
    if len(shape) not in (1, 2) or has_other_length:
        raise ValueError(
            f"{name}: positions must be (len) or (batch, len) with len {length}, got shape {shape}."
        )
    return positions


def require_integers(name: str, *positions: Any) -> None:
    """Raise TypeError for positions that are real numbers. For layers that read a table by
    position."""
    for p in positions:
        if "int" not in keras.backend.standardize_dtype(p.dtype):
            raise TypeError(f"{name}: positions must be integers, got {p.dtype}.")


def is_inferring_shapes() -> bool:
    """Return True while Keras calls the layer only to infer the shape of its output. Lengths are
    then invented and must not be checked."""
    return in_symbolic_scope()


def numbers_if_readable(positions: Any) -> np.ndarray | None:
    """Return the positions as a NumPy array, which waits for an accelerator; None while the code is
    traced, when they have no values."""
    if is_inferring_shapes():
        return None
    backend = keras.backend.backend()
    if backend == "jax":
        from jax.core import Tracer

        is_traced = isinstance(positions, Tracer)
    elif backend == "torch":
        import torch

        is_traced = torch.compiler.is_compiling()
    else:
        is_traced = not hasattr(positions, "numpy")
    return None if is_traced else ops.convert_to_numpy(positions)


def distances(q_positions: Any, kv_positions: Any) -> Any:
    """Return query position minus key position, (q_len, kv_len) or (batch, q_len, kv_len)."""
    return ops.expand_dims(q_positions, -1) - ops.expand_dims(kv_positions, -2)


def serialize_argument(argument: Any) -> Any:
    """Return a constructor's argument in the form that `get_config` stores: a dict for an
    initializer or a layer, anything else unchanged.

    The dict of a layer has the layer's id, so that Keras restores a single object for all layers
    that shared it. Keras adds this id itself, but only after it has copied the config of the first
    of them.
    """
    if isinstance(argument, keras.initializers.Initializer):
        return keras.initializers.serialize(argument)
    if not isinstance(argument, keras.layers.Layer):
        return argument
    config: Any = keras.saving.serialize_keras_object(argument)
    return {**config, "shared_object_id": id(argument)}


def restore_layer(layer: Any) -> Any:
    """Return the layer that a dict of `serialize_argument` describes; return anything but a dict
    unchanged."""
    return keras.saving.deserialize_keras_object(layer) if isinstance(layer, dict) else layer


PHASE_BITS = 30
"""Bits of a phase: it counts units of 2^-30 turn, so that a sum of phases fits int32."""
QUARTER_TURN = 1 << (PHASE_BITS - 2)
FINE_BITS = 12
"""Number of a phase's last bits, its fine part. The other bits count coarse steps of 2^12 units. An
eighth of a turn has 2^15 of them, which float32 represents exactly."""
_RADIANS_PER_COARSE_STEP = 2 * math.pi / (1 << (PHASE_BITS - FINE_BITS))
_ROUNDED_RADIANS_PER_COARSE_STEP = round(_RADIANS_PER_COARSE_STEP * 2**23) / 2**23
"""Radians per coarse step, rounded to 8 significant bits, so that a product with a 16-bit number is
exact in float32. The part that rounding removes is added with the fine part."""


class Int32Frequencies:
    """Compute cos and sin of position times frequency in int32 and float32, with an error below
    1.5e-7 at every whole position below 2^31 in absolute value.

    jax has neither int64 nor float64 by default. So turns are counted in units of 2^-30 by integers
    that cannot overflow an int32, and only a rest of at most an eighth of a turn becomes a float.
    Real positions are as exact as their dtype.
    """

    def __init__(self, inv_freq: Sequence[Decimal | float]) -> None:
        self.high, self.low = digit_turns(inv_freq)
        self.radians = tuple(float(f) for f in inv_freq)

    def cos_sin(self, positions: Any, factor: float = 1.0) -> tuple[Any, Any]:
        """Return float32 cos and sin of position times frequency, times `factor`, each
        (*positions.shape, frequencies)."""
        positions = ops.expand_dims(ops.convert_to_tensor(positions), -1)
        fraction_radians = None
        if "float" in str(positions.dtype):
            whole_positions = ops.floor(positions)
            fraction_radians = ops.cast(
                positions - whole_positions, "float32"
            ) * ops.convert_to_tensor(self.radians, "float32")
            positions = whole_positions
        phase = self._whole_phase(ops.cast(positions, "int32"))
        # The nearest quarter turn; the rest is at most an eighth of a turn.
        quarter = ops.right_shift(phase + QUARTER_TURN // 2, PHASE_BITS - 2)
        cos, sin = _cos_sin_of_rest(
            phase - ops.left_shift(quarter, PHASE_BITS - 2), fraction_radians
        )
        # A turn by a quarter maps (cos, sin) to (-sin, cos), one by a half to (-cos, -sin).
        is_odd = ops.bitwise_and(quarter, 1) == 1
        is_turned_by_half = ops.bitwise_and(quarter, 2) == 2
        cos, sin = ops.where(is_odd, -sin, cos), ops.where(is_odd, cos, sin)
        sign = ops.where(is_turned_by_half, -factor, factor)
        return cos * sign, sin * sign

    def _whole_phase(self, positions: Any) -> Any:
        """Return the phase of each frequency at whole positions (..., 1), (..., frequencies), in
        units of 2^-30 turn and modulo one turn."""
        distance_from_zero = ops.abs(positions)
        high = low = 0
        for index, (unit_high, unit_low) in enumerate(zip(self.high, self.low, strict=True)):
            digit = ops.right_shift(distance_from_zero, index * DIGIT_BITS)
            digit = ops.bitwise_and(digit, (1 << DIGIT_BITS) - 1)
            unit_high = ops.convert_to_tensor(unit_high, "int32")
            unit_low = ops.convert_to_tensor(unit_low, "int32")
            high = high + ops.bitwise_and(digit * unit_high, (1 << PART_BITS) - 1)
            low = low + ops.right_shift(digit * unit_low, 2 * PART_BITS - PHASE_BITS)
        high = ops.bitwise_and(high, (1 << PART_BITS) - 1)
        phase = ops.left_shift(high, PHASE_BITS - PART_BITS) + low
        phase = ops.where(positions < 0, -phase, phase)
        return ops.bitwise_and(phase, (1 << PHASE_BITS) - 1)


def _cos_sin_of_rest(rest: Any, fraction_radians: Any) -> tuple[Any, Any]:
    """Return float32 cos and sin of an angle: `rest`, in units of 2^-30 turn and at most an eighth
    of a turn, plus `fraction_radians` in radians, None for 0."""
    coarse = ops.cast(ops.right_shift(rest, FINE_BITS), "float32")
    fine = ops.cast(ops.bitwise_and(rest, (1 << FINE_BITS) - 1), "float32")
    small_angle = coarse * (_RADIANS_PER_COARSE_STEP - _ROUNDED_RADIANS_PER_COARSE_STEP) + fine * (
        _RADIANS_PER_COARSE_STEP / (1 << FINE_BITS)
    )
    if fraction_radians is not None:
        small_angle = small_angle + fraction_radians
    angle = coarse * _ROUNDED_RADIANS_PER_COARSE_STEP + small_angle
    return ops.cos(angle), ops.sin(angle)
