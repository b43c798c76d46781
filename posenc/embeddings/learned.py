"""Learned absolute position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.encoding import ModelShape, PositionEncoding, at_least_float32


class Learned(PositionEncoding):
    """Add one learned vector per position to the embeddings.

    x[p] += weight[p]

    Args:
        max_positions: rows of the table; a position at or above it has no embedding.
        embed_dim: width of the embeddings.
        init_std: standard deviation of the initial values: GPT-2 and BERT use 0.02.

    Shapes: x (batch, seq_len, embed_dim), integer positions (seq_len) or (batch, seq_len) -> like
    x.
    Precision: added in float32, returned in x's dtype.
    Raises: ValueError for a position outside of the table (checked on the CPU; CUDA asserts).
    Source: Devlin et al. 2019, arXiv:1810.04805; Radford et al. 2019 (GPT-2).
    """

    places = (1,)
    shift_invariant = False
    causal_only = False
    source = "Devlin et al. 2019, arXiv:1810.04805; Radford et al. 2019"

    def __init__(self, max_positions: int, embed_dim: int, *, init_std: float = 0.02) -> None:
        super().__init__()
        if max_positions < 1:
            raise ValueError(f"Learned: max_positions must be at least 1, got {max_positions}.")
        self.max_positions = max_positions
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(max_positions, embed_dim))
        self.reset_parameters()

    @classmethod
    def from_shape(cls, shape: ModelShape, **options) -> Learned:
        return super().from_shape(shape, **{"max_positions": shape.train_length, **options})

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)

    @property
    def num_parameters(self) -> int:
        return self.weight.shape[0] * self.weight.shape[1]

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        if positions.is_floating_point():
            raise TypeError(f"Learned: positions must be integers, got {positions.dtype}.")
        self._check_range(positions)
        dtype = at_least_float32(x.dtype)
        return (x.to(dtype) + F.embedding(positions, self.weight).to(dtype)).to(x.dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.embed(x, positions)

    def _check_range(self, positions: Tensor) -> None:
        if torch.compiler.is_compiling() or positions.device.type != "cpu" or not positions.numel():
            return
        low, high = (int(p) for p in positions.aminmax())
        if low < 0 or high >= self.weight.shape[0]:
            outside = high if high >= self.weight.shape[0] else low
            raise ValueError(
                f"Learned: position {outside} is outside of the table, which "
                f"has {self.weight.shape[0]} rows. Grow the table or shorten the input."
            )
