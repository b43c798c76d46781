"""Sinusoidal embeddings of rows and columns, for image patches."""

from dataclasses import replace

import torch
from jaxtyping import Float, Real
from torch import Tensor

from posenc.encodings.embeddings.added_embedding import AddedEmbedding
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.frequencies.series import inverse_frequencies
from posenc.positions.tokens import has_no_place, move_placeless_to_origin


class SinCos2D(AddedEmbedding):
    """Add sines and cosines of the column, then of the row, to the embeddings.

    x += [sin(c w) | cos(c w) | sin(r w) | cos(r w)],  w_t = base^(-4t/embed_dim), t < embed_dim/4

    The column comes first, as in the code of MAE and MoCo v3. A token whose row and column are NaN
    (a class token, see posenc.positions.grid) gets zeros.

    Args:
        embed_dim: width of the embeddings, a multiple of 4.
        base: ratio of the slowest to the fastest wavelength.

    Shapes: x (batch, seq_len, embed_dim), positions (seq_len, 2) or (batch, seq_len, 2) as (row,
    column), see posenc.positions.grid -> like x.
    Units: positions in patches, integer or real. Precision: exact angles; added in float32.
    Raises: ValueError if embed_dim is not a multiple of 4.
    Source: He et al. 2022, arXiv:2111.06377, github.com/facebookresearch/mae util/pos_embed.py.

    >>> posenc.SinCos2D(embed_dim=4)(torch.zeros(1, 2, 4), torch.tensor([[0, 0], [0, 1]]))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0000, 1.0000]]])
    """

    claims = replace(
        AddedEmbedding.claims,
        source="He et al. 2022, arXiv:2111.06377, util/pos_embed.py",
        num_axes=2,
    )

    def __init__(self, embed_dim: int, *, base: float = 10000.0) -> None:
        super().__init__(embed_dim)
        if embed_dim % 4:
            raise ValueError(f"SinCos2D: embed_dim must be a multiple of 4, got {embed_dim}.")
        self.exact_frequencies = ExactFrequencies(inverse_frequencies(embed_dim // 2, base))

    def vectors(
        self, positions: Real[Tensor, "*where 2"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*where {self.embed_dim}"]:
        """Return sines and cosines of each (row, column), (..., embed_dim) in `dtype`; zeros for
        tokens whose row and column are NaN."""
        column_and_row = move_placeless_to_origin(positions).flip(-1)
        cos, sin = self.exact_frequencies.cos_sin(
            column_and_row, dtype
        )  # (..., column and row, pairs)
        rows = torch.stack([sin, cos], dim=-2).flatten(-3)
        return rows.masked_fill(has_no_place(positions)[..., None], 0)
