"""Sinusoidal position embeddings."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor
from torch.nn import functional as F

from posenc.encodings.embeddings.added_embedding import AddedEmbedding
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.frequencies.series import sinusoidal_frequencies


class Sinusoidal(AddedEmbedding):
    """Add sines and cosines of geometrically spaced wavelengths to the embeddings.

    x[p, 2t] += sin(p w_t);  x[p, 2t+1] += cos(p w_t);  w_t = base^(-2t/embed_dim)

    Channel 0 is the fastest (period 2 pi), the last pair the slowest. The paper multiplies token
    embeddings by sqrt(embed_dim) first; that is left to the model. A checkpoint needs the order
    that it was trained with:

    interleaved: [sin, cos, sin, cos, ...], the paper.
    concatenated: [all sin | all cos] of the same wavelengths, Transformer-XL.
    fairseq: [all sin | all cos] of w_t = base^(-t/(embed_dim/2 - 1)), which ends at 1/base exactly;
        tensor2tensor and fairseq. An odd last channel stays zero.

    Args:
        embed_dim: width of the embeddings; must be even unless order is "fairseq".
        base: timescale (period / 2 pi) of the slowest pair, or just beyond it.
        order: order of sines and cosines, one of the three.
        min_timescale: timescale of the fastest pair. tensor2tensor multiplies frequencies by its
            min_timescale, this class divides them: its (min_timescale=m, max_timescale=M) is
            (min_timescale=1/m, base=M/m^2) here.
        padding_idx: position that gets zeros; fairseq's positions begin at padding_idx + 1
            (posenc.positions.positions_from_mask).

    Shapes: x (batch, seq_len, embed_dim), positions (seq_len) or (batch, seq_len) -> like x.
    Units: positions in tokens. Precision: exact angles, see
    ExactFrequencies; added in float32, returned in x's dtype.
    Raises: ValueError for an unknown order, or if embed_dim is odd and order is not "fairseq".
    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.

    >>> posenc.Sinusoidal(embed_dim=4)(torch.zeros(1, 2, 4), torch.arange(2))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    claims = replace(
        AddedEmbedding.claims, source="Vaswani et al. 2017, arXiv:1706.03762, section 3.5"
    )

    def __init__(
        self,
        embed_dim: int,
        *,
        base: float = 10000.0,
        order: Literal["interleaved", "concatenated", "fairseq"] = "interleaved",
        min_timescale: float = 1.0,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__(embed_dim)
        inv_freq = sinusoidal_frequencies(embed_dim, base, order, min_timescale)
        self.order = order
        self.padding_idx = padding_idx
        self.exact_frequencies = ExactFrequencies(inv_freq)

    def vectors(
        self, positions: Real[Tensor, "*where"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*where {self.embed_dim}"]:
        """Return sines and cosines for each position, in the order `order`: (*positions.shape,
        embed_dim) in `dtype`."""
        cos, sin = self.exact_frequencies.cos_sin(positions, dtype)
        if self.order == "interleaved":
            rows = torch.stack([sin, cos], dim=-1).flatten(-2)
        else:
            rows = F.pad(torch.cat([sin, cos], dim=-1), (0, self.embed_dim % 2))
        if self.padding_idx is None:
            return rows
        return rows.masked_fill((positions == self.padding_idx)[..., None], 0)
