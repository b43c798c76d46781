"""Sinusoidal position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.angles import Angles
from posenc.encoding import PositionEncoding, at_least_float32
from posenc.frequencies import inverse_frequencies


class Sinusoidal(PositionEncoding):
    """Add sines and cosines of geometrically spaced wavelengths to the embeddings.

    x[p, 2t] += sin(p * base^(-2t/embed_dim));  x[p, 2t+1] += cos(p * base^(-2t/embed_dim))

    Channel 0 is the fastest (period 2 pi), the last pair the slowest. The paper multiplies token
    embeddings by sqrt(embed_dim) first; that belongs to the model.

    Args:
        embed_dim: width of the embeddings, even.
        base: ratio of the slowest to the fastest wavelength.

    Shapes: x (batch, seq_len, embed_dim), positions (seq_len) or (batch, seq_len) -> like x.
    Units: positions in tokens. Precision: exact angles, see posenc.angles; added in float32,
    returned in x's dtype.
    Raises: ValueError if embed_dim is odd.
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    places = (1,)
    shift_invariant = False
    causal_only = False
    source = "Vaswani et al. 2017, arXiv:1706.03762, section 3.5"

    def __init__(self, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        if embed_dim % 2:
            raise ValueError(f"Sinusoidal: embed_dim must be even, got {embed_dim}.")
        self.angles = Angles(inverse_frequencies(embed_dim, base))

    def table(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The embedding of each position: (*positions.shape, embed_dim)."""
        cos, sin = self.angles.cos_sin(positions, dtype)
        return torch.stack([sin, cos], dim=-1).flatten(-2)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        dtype = at_least_float32(x.dtype)
        return (x.to(dtype) + self.table(positions, dtype)).to(x.dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.embed(x, positions)
