"""Learned embeddings of image patches."""

import math
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import check_count, explain_misfits
from posenc.encodings.base.check_inputs import refuse_table_of_other_grid, whole_cells
from posenc.encodings.base.position_encoding import ModelShape
from posenc.encodings.embeddings.added_embedding import AddedEmbedding
from posenc.encodings.embeddings.grow import interpolate_2d
from posenc.encodings.embeddings.learned import check_row_indices
from posenc.positions.tokens import has_no_place


class Learned2D(AddedEmbedding):
    """Add one learned vector per cell of a grid to the embeddings.

    x[r, c] += weight[r * width + c]

    A token whose row and column are NaN (a class token, see posenc.positions.grid) gets zeros.

    Args:
        height, width: the grid, in patches.
        embed_dim: width of the embeddings.
        init_std: standard deviation of the initial values (normal, truncated at two deviations).

    Shapes: x (batch, seq_len, embed_dim), positions (seq_len, 2) or (batch, seq_len, 2) as (row,
    column), whole numbers or NaN, see posenc.positions.grid -> like x.
    Precision: added in float32, returned in x's dtype.
    Raises: ValueError for a row or column outside of the grid or between two cells (checked on the
    CPU; CUDA asserts, and rounds down).
    Source: Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1 and appendix D.4.

    >>> learned = posenc.Learned2D(height=14, width=14, embed_dim=64)
    >>> learned(torch.zeros(1, 196, 64), posenc.positions.grid(14, 14)).shape
    torch.Size([1, 196, 64])
    >>> learned.resize(16, 16).weight.shape
    torch.Size([256, 64])
    """

    claims = replace(
        AddedEmbedding.claims,
        source="Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.1",
        num_axes=2,
    )

    def __init__(self, height: int, width: int, embed_dim: int, *, init_std: float = 0.02) -> None:
        super().__init__(embed_dim)
        if height < 1 or width < 1:
            raise ValueError(
                f"Learned2D: the grid must have at least one cell, got {height} x {width}."
            )
        self.height = height
        self.width = width
        self.claims = replace(self.claims, max_positions=min(height, width))
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(height * width, embed_dim))
        self.register_load_state_dict_pre_hook(refuse_table_of_other_grid)
        self.reset_parameters()

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options) -> "Learned2D":
        """Build the encoding for a model. The grid defaults to the smallest square with at least
        train_length cells."""
        side = math.isqrt(shape.train_length - 1) + 1
        return super().from_shape(shape, **{"height": side, "width": side, **options})

    def reset_parameters(self) -> None:
        std = self.init_std
        if std:
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        else:
            nn.init.zeros_(self.weight)

    @explain_misfits
    def resize(
        self,
        height: int,
        width: int,
        *,
        mode: Literal["bicubic", "bilinear"] = "bicubic",
        align_corners: bool = False,
        antialias: bool = False,
    ) -> "Learned2D":
        """Return a new Learned2D for a grid of `height` x `width`, with this table resized by
        posenc.encodings.embeddings.grow.interpolate_2d, which says which models take which mode,
        align_corners and antialias.

        >>> learned = posenc.Learned2D(height=16, width=16, embed_dim=64)
        >>> siglip2 = learned.resize(7, 20, mode="bilinear", antialias=True)
        >>> qwen3_vl = learned.resize(7, 20, mode="bilinear", align_corners=True)
        """
        check_count("Learned2D.resize", "height", height)
        check_count("Learned2D.resize", "width", width)
        table = interpolate_2d(
            self.weight.detach(),
            (self.height, self.width),
            (height, width),
            mode=mode,
            align_corners=align_corners,
            antialias=antialias,
        )
        resized = Learned2D(height, width, table.shape[1], init_std=self.init_std).to(table)
        with torch.no_grad():
            resized.weight.copy_(table)
        return resized

    def vectors(
        self, positions: Real[Tensor, "*where 2"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*where {self.embed_dim}"]:
        """Return the vector of the table for each (row, column), (..., embed_dim) in `dtype`; zeros
        for tokens whose row and column are NaN."""
        row, column = whole_cells("Learned2D", positions).unbind(-1)
        check_row_indices("Learned2D", "row", row, self.height)
        check_row_indices("Learned2D", "column", column, self.width)
        rows = F.embedding(row * self.width + column, self.weight).to(dtype)
        return rows.masked_fill(has_no_place(positions)[..., None], 0)
