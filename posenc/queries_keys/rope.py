"""Rotary position embeddings."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from posenc.angles import Angles
from posenc.encoding import PositionEncoding, at_least_float32
from posenc.frequencies import inverse_frequencies
from posenc.queries_keys.rotate import rotate


class RoPE(PositionEncoding):
    """Rotate each pair of channels of q and k by an angle proportional to the position.

    (q_a, q_b) -> (q_a cos - q_b sin, q_b cos + q_a sin), angle = position *
    rope_theta^(-2t/rotary_dim)

    The score of a rotated query and key depends on their positions through the difference alone.

    Args:
        head_dim: size of one head.
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1), as in RoFormer, GPT-J and Meta's Llama; False: (t, t +
            rotary_dim/2), as
            in GPT-NeoX and Hugging Face's Llama. Checkpoints of one layout are wrong in the other,
            so there is no default.
        rotary_dim: rotate only the first channels; None means all of them.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim) -> the
    same.
    Units: positions in tokens, integer or real. Precision: exact angles (posenc.angles), rotated in
    float32, rounded once.
    Raises: ValueError if rotary_dim is odd or exceeds head_dim.
    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.
    """

    places = (2,)
    causal_only = False
    source = "Su et al. 2021, arXiv:2104.09864, section 3.2"

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        if rotary_dim % 2:
            name = "head_dim" if rotary_dim == head_dim else "rotary_dim"
            even = rotary_dim - 1
            raise ValueError(
                f"RoPE: {name} must be even, got {rotary_dim}. "
                f"Use rotary_dim={even} to rotate only the first {even} channels."
            )
        if not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"RoPE: rotary_dim must be between 2 and head_dim={head_dim}, got {rotary_dim}."
            )
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        self.angles = Angles(inverse_frequencies(rotary_dim, rope_theta))
        self._ready: tuple[Tensor, Tensor, Tensor] | None = None

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of every pair's angle, each (*positions.shape, rotary_dim / 2)."""
        if (
            self._ready is not None
            and positions is self._ready[0]
            and dtype == self._ready[1].dtype
        ):
            return self._ready[1], self._ready[2]
        return self.angles.cos_sin(positions, dtype)

    def prepare(self, positions: Tensor, length: int | None = None) -> RoPE:
        prepared = copy.copy(self)
        prepared._ready = (positions, *self.angles.cos_sin(positions))
        return prepared

    def transform_qk(
        self, q: Tensor, k: Tensor, q_positions: Tensor, kv_positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        self._check(q)
        self._check(k)
        dtype = at_least_float32(q.dtype)
        cos, sin = self.cos_sin(q_positions, dtype)
        q = rotate(q, cos, sin, interleaved=self.interleaved)
        if kv_positions is not q_positions:
            cos, sin = self.cos_sin(kv_positions, dtype)
        return q, rotate(k, cos, sin, interleaved=self.interleaved)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q and k of the same tokens."""
        return self.transform_qk(q, k, positions, positions)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.head_dim:
            raise ValueError(
                f"RoPE: built for head_dim={self.head_dim}, got q or k with shape {tuple(x.shape)}."
            )
