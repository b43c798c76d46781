"""Rotary position embeddings."""

import dataclasses
from functools import lru_cache
from typing import Any

import keras

from posenc.frequencies.scalings.lookup import SCALINGS
from posenc.frequencies.scalings.scaling import Scaling, rope_frequencies
from posenc.frequencies.series import inverse_frequencies
from posenc.keras.position_layer import (
    Int32Frequencies,
    PositionLayer,
    at_least_float32,
    ops,
    token_positions,
)


@keras.saving.register_keras_serializable(package="posenc")
class RotaryEmbedding(PositionLayer):
    """Rotate each pair of channels of queries or keys by an angle proportional to the position.

    (x_a, x_b) -> m (x_a cos - x_b sin, x_b cos + x_a sin), angle = position * inv_freq[t]

    Args:
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1); False: (t, t + rotary_dim/2). Required, because a
            checkpoint needs the layout that it was trained with.
        rotary_dim: number of channels that rotate, the first ones; None means all.
        scaling: one of posenc.frequencies.scalings, as an object or as
            {"name": "yarn", "factor": 4.0, ...}.

    Call: x (batch, seq_len, head_dim) or (batch, seq_len, heads, head_dim), positions (seq_len) or
    (batch, seq_len), by default start_index, start_index + 1, ... -> like x. `length`, the current
    length as a Python number, is for scalings that depend on it; None means the training length.
    Precision: see posenc.keras.position_layer.Int32Frequencies; rotated in float32.
    Raises: ValueError if rotary_dim does not fit, if the scaling is unknown, or if `length` is
    given and no frequency depends on it; TypeError for a traced length.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2, and the source of the scaling.
    """

    def __init__(
        self,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        rotary_dim: int | None = None,
        scaling: Scaling | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not rope_theta > 0:
            raise ValueError(f"RotaryEmbedding: rope_theta must be positive, got {rope_theta}.")
        self.rope_theta = rope_theta
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        self.scaling = _scaling_from_config(scaling)

    def build(self, input_shape) -> None:
        head_dim = input_shape[-1]
        self._rotary_width = head_dim if self.rotary_dim is None else self.rotary_dim
        if self._rotary_width % 2 or not 0 < self._rotary_width <= head_dim:
            raise ValueError(
                f"RotaryEmbedding: rotary_dim must be even and between 2 and head_dim={head_dim}, "
                f"got {self._rotary_width}."
            )
        self._frequencies, self._attention_factor = self._frequencies_at_length(None)
        self._unscaled_frequencies = None
        if self.scaling is not None and self.scaling.exempt_tokens:
            self._unscaled_frequencies = Int32Frequencies(
                inverse_frequencies(self._rotary_width, self.rope_theta)
            )

    def scale(self, head_dim: int) -> float:
        """Return the factor of q . k in the scores."""
        return head_dim**-0.5 * (1.0 if self.scaling is None else self.scaling.logit_scale)

    def cos_sin(self, positions: Any, length: int | None = None) -> tuple[Any, Any]:
        """Return float32 cos and sin of every pair, (*positions.shape, pairs), times the attention
        factor."""
        frequencies = self._frequencies
        factor = self._attention_factor
        if length is not None:
            frequencies, factor = self._frequencies_at_length(length)
        cos, sin = frequencies.cos_sin(positions, factor)
        if self._unscaled_frequencies is None or self.scaling is None:
            return cos, sin
        is_exempt = ops.expand_dims(positions < self.scaling.exempt_tokens, -1)
        unscaled_cos, unscaled_sin = self._unscaled_frequencies.cos_sin(positions)
        return ops.where(is_exempt, unscaled_cos, cos), ops.where(is_exempt, unscaled_sin, sin)

    def rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        """Return x rotated by the tables that `cos_sin` returned for its tokens, rounded to the
        compute dtype. One pair of tables serves queries and keys of the same tokens."""
        unrotated = ops.convert_to_tensor(x)[..., self._rotary_width :]
        x = at_least_float32(x)[..., : self._rotary_width]
        if len(x.shape) == 4:  # all heads use the same cos and sin
            cos = ops.expand_dims(cos, -2)
            sin = ops.expand_dims(sin, -2)
        if self.interleaved:
            pairs = ops.reshape(x, (*ops.shape(x)[:-1], self._rotary_width // 2, 2))
            first = pairs[..., 0]
            second = pairs[..., 1]
        else:
            first, second = ops.split(x, 2, axis=-1)
        rotated = first * cos - second * sin, second * cos + first * sin
        if self.interleaved:
            out = ops.reshape(ops.stack(rotated, axis=-1), ops.shape(x))
        else:
            out = ops.concatenate(rotated, axis=-1)
        return ops.concatenate(
            [self.to_compute_dtype(out), self.to_compute_dtype(unrotated)], axis=-1
        )

    def call(self, x, positions=None, start_index=0, length=None):
        positions = token_positions(self.name, ops.shape(x)[1], positions, start_index)
        return self.rotate(x, *self.cos_sin(positions, length))

    def _frequencies_at_length(self, length: int | None) -> tuple[Int32Frequencies, float]:
        """Return the frequencies and the factor of cos and sin at this length in tokens; None: the
        training length. Raise TypeError unless `length` is an int or None, ValueError if the
        frequencies do not depend on it."""
        if length is not None:
            if not isinstance(length, int):
                raise TypeError(
                    "RotaryEmbedding: length must be a Python int, since the frequencies are "
                    f"computed from it before anything is traced; got {type(length).__name__}."
                )
            if self.scaling is None or not self.scaling.depends_on_length:
                raise ValueError(
                    "RotaryEmbedding: length was given, and these frequencies do not depend on it."
                )
        return _cached_frequencies(self._rotary_width, self.rope_theta, self.scaling, length)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        scaling = self.scaling
        if scaling is not None:
            config["scaling"] = {"name": scaling.name, **dataclasses.asdict(scaling)}  # pyright: ignore
        return config


@lru_cache(maxsize=128)
def _cached_frequencies(
    rotary_dim: int, rope_theta: float, scaling: Scaling | None, length: int | None
) -> tuple[Int32Frequencies, float]:
    """Return the frequencies of `rope_frequencies` as Int32Frequencies, and the factor of cos and
    sin. Cached, because decimal arithmetic is slow."""
    inv_freq, factor = rope_frequencies(rotary_dim, rope_theta, scaling, length)
    return Int32Frequencies(inv_freq), factor


def _scaling_from_config(
    scaling: Scaling | dict[str, Any] | None,
) -> Scaling | None:
    """Return the scaling that a dict {"name": ..., option: value, ...} describes; return anything
    but a dict unchanged."""
    if not isinstance(scaling, dict):
        return scaling
    options = dict(scaling)
    name = options.pop("name", None)
    if name not in SCALINGS:
        raise ValueError(
            f"RotaryEmbedding: unknown scaling {name!r}; known: {', '.join(SCALINGS)}."
        )
    return SCALINGS[name](**options)
