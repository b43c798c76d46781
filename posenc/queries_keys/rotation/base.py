"""What all methods share that rotate q and k by angles known from the positions alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from posenc.encoding.base import PositionEncoding
from posenc.numbers.angles import Angles
from posenc.numbers.precision import at_least_float32
from posenc.queries_keys.rope_scaling import Frequencies
from posenc.queries_keys.rotation.rotate import rotate, rotate_together


class Rotation(PositionEncoding):
    """Rotate pairs of channels of q and k; a subclass calls `_rotate_by` with its frequencies.

    `interleaved`: pairs are (2t, 2t+1); False: (t, t + rotary_dim/2).
    """

    places = (2,)
    causal_only = False

    def __init__(self, head_dim: int, *, interleaved: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.interleaved = interleaved
        self._ready: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()

    def _rotate_by(self, frequencies: Frequencies, axes: Sequence[int] | None = None) -> None:
        """Use these frequencies; pair t turns with component axes[t] of the positions."""
        self.angles = Angles(frequencies.inv_freq, axes)
        self.attention_factor = frequencies.attention_factor
        self._ready = ()

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of every pair's angle, each (len, pairs) or (batch, len, pairs), times
        attention_factor."""
        for ready, cos, sin in self._ready:
            if positions is ready and dtype == cos.dtype:
                return cos, sin
        return self._tables(positions, dtype)

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.angles.cos_sin(positions, dtype, self.attention_factor)

    def prepare(self, positions: Tensor, length: int | None = None) -> Self:
        prepared = self.shallow_copy()
        prepared._ready = ((positions, *self.cos_sin(positions)),)
        return prepared

    def transform_qk(
        self, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._check(q)
        self._check(k)
        dtype = at_least_float32(q.dtype)
        cos, sin = self.cos_sin(q_positions, dtype)
        if kv_positions is q_positions:
            q, k = rotate_together((q, k), cos, sin, interleaved=self.interleaved)
            return q, k
        q = rotate(q, cos, sin, interleaved=self.interleaved)
        cos, sin = self.cos_sin(kv_positions, dtype)
        return q, rotate(k, cos, sin, interleaved=self.interleaved)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k of the same tokens."""
        return self.transform_qk(q, k, positions, positions)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.head_dim:
            raise ValueError(
                f"{type(self).__name__}: built for head_dim={self.head_dim}, "
                f"got q or k with shape {tuple(x.shape)}."
            )
