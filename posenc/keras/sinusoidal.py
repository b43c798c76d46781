"""Sinusoidal position embeddings."""

from typing import Any

import keras

from posenc.frequencies.series import sinusoidal_frequencies
from posenc.keras.int32_frequencies import Int32Frequencies
from posenc.keras.position_layer import PositionLayer, at_least_float32, ops, token_positions


@keras.saving.register_keras_serializable(package="posenc")
class SinusoidalPositionEncoding(PositionLayer):
    """Add sines and cosines of geometrically spaced wavelengths to the embeddings.

    x[p, 2t] += sin(p w_t);  x[p, 2t+1] += cos(p w_t);  w_t = base^(-2t/embed_dim)

    Args:
        base: timescale (period / 2 pi) of the slowest pair, or just beyond it.
        order: "interleaved" (the paper), "concatenated" (all sines, then all cosines) or "fairseq"
            (concatenated, ending at 1/base exactly); see posenc.Sinusoidal.
        min_timescale: timescale of the fastest pair.
        padding_idx: a position that gets zeros.

    Call: x (batch, seq_len, embed_dim), positions (seq_len) or (batch, seq_len), by default
    start_index, start_index + 1, ... -> like x.
    Precision: posenc.keras.int32_frequencies; added in float32.
    Raises: ValueError as posenc.Sinusoidal does, when the layer is built.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(
        self,
        *,
        base: float = 10000.0,
        order: str = "interleaved",
        min_timescale: float = 1.0,
        padding_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.base = base
        self.order = order
        self.min_timescale = min_timescale
        self.padding_idx = padding_idx
        sinusoidal_frequencies(2, base, order, min_timescale)  # raises now for invalid arguments

    def build(self, input_shape) -> None:
        self.embed_dim = input_shape[-1]
        self._phases = Int32Frequencies(
            sinusoidal_frequencies(self.embed_dim, self.base, self.order, self.min_timescale)
        )

    def vectors(self, positions: Any) -> Any:
        """Return the vector to add at each position, float32 (*positions.shape, embed_dim)."""
        cos, sin = self._phases.cos_sin(positions)
        if self.order == "interleaved":
            shape = (*positions.shape, self.embed_dim)
            rows = ops.reshape(ops.stack([sin, cos], axis=-1), shape)
        else:
            rows = ops.concatenate([sin, cos], axis=-1)
            if self.embed_dim % 2:
                rows = ops.concatenate([rows, ops.zeros_like(rows[..., :1])], axis=-1)
        if self.padding_idx is None:
            return rows
        return ops.where(ops.expand_dims(positions == self.padding_idx, -1), 0.0, rows)

    def embed(self, x: Any, positions: Any, start_index: Any) -> Any:
        """Return x with the embeddings added, not yet rounded to the compute dtype. positions=None
        means start_index, start_index + 1, ..."""
        positions = token_positions(self.name, ops.shape(x)[1], positions, start_index)
        return at_least_float32(x) + self.vectors(positions)

    def call(self, x, positions=None, start_index=0):
        return self.to_compute_dtype(self.embed(x, positions, start_index))
