"""Learned absolute position embeddings."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.arguments import explain_misfits
from posenc.encodings.base.position_encoding import ModelShape
from posenc.encodings.embeddings.added_embedding import AddedEmbedding
from posenc.encodings.embeddings.sinusoidal import Sinusoidal
from posenc.encodings.numerics.torch_modes import extremes_if_readable

INIT_KINDS = ("normal", "truncated_normal", "sinusoidal")


class Learned(AddedEmbedding):
    """Add one learned vector per position to the embeddings.

    x[p] += weight[p]

    posenc.encodings.embeddings.grow lengthens the table.

    Args:
        max_positions: rows of the table; positions must be below it.
        embed_dim: width of the embeddings.
        init: initial values: "normal" as in GPT-2, "truncated_normal" (at two standard deviations)
            as in BERT's code, "sinusoidal" as in Sinusoidal.
        init_std: standard deviation of random initial values; GPT-2 and BERT use 0.02.

    Shapes: x (batch, seq_len, embed_dim), integer positions (seq_len) or (batch, seq_len) -> like
    x.
    Precision: added in float32, returned in x's dtype.
    Raises: ValueError for a position outside of the table (checked on the CPU; CUDA asserts).
    Source: Devlin et al. 2019, arXiv:1810.04805; Radford et al. 2019 (GPT-2).

    >>> learned = posenc.Learned(max_positions=512, embed_dim=64)
    >>> learned(torch.zeros(1, 3, 64), torch.tensor([0, 1, 511])).shape
    torch.Size([1, 3, 64])
    """

    claims = replace(
        AddedEmbedding.claims, source="Devlin et al. 2019, arXiv:1810.04805; Radford et al. 2019"
    )

    def __init__(
        self,
        max_positions: int,
        embed_dim: int,
        *,
        init: Literal["normal", "truncated_normal", "sinusoidal"] = "normal",
        init_std: float = 0.02,
    ) -> None:
        super().__init__(embed_dim)
        if init not in INIT_KINDS:
            raise ValueError(f"Learned: init must be one of {INIT_KINDS}, got {init!r}.")
        self.max_positions = max_positions
        self.claims = replace(self.claims, max_positions=max_positions)
        self.init = init
        self.init_std = init_std
        self.weight = nn.Parameter(torch.empty(max_positions, embed_dim))
        self.reset_parameters()

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options) -> "Learned":
        return super().from_shape(shape, **{"max_positions": shape.train_length, **options})

    @classmethod
    def from_table(cls, table: Float[Tensor, "max_positions embed_dim"]) -> "Learned":
        """Build the encoding with this table, (max_positions, embed_dim), as its weights."""
        encoding = cls(*table.shape).to(table)
        with torch.no_grad():
            encoding.weight.copy_(table)
        return encoding

    def reset_parameters(self) -> None:
        if self.init == "normal":
            nn.init.normal_(self.weight, std=self.init_std)
        elif self.init == "truncated_normal":
            std = self.init_std
            nn.init.trunc_normal_(self.weight, std=std, a=-2 * std, b=2 * std)
        else:
            rows = torch.arange(self.weight.shape[0], device=self.weight.device)
            with torch.no_grad():
                self.weight.copy_(Sinusoidal(self.weight.shape[1]).vectors(rows))

    def vectors(
        self, positions: Integer[Tensor, "*where"], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*where {self.embed_dim}"]:
        """Return the row of the table for each position, (*positions.shape, embed_dim) in
        `dtype`."""
        if positions.is_floating_point():
            raise TypeError(f"Learned: positions must be integers, got {positions.dtype}.")
        check_row_indices("Learned", "position", positions, self.weight.shape[0])
        return F.embedding(positions, self.weight).to(dtype)


def check_row_indices(name: str, index_name: str, index: Int[Tensor, "..."], num_rows: int) -> None:
    """Raise ValueError for an index below 0 or from `num_rows` on; indices that are not on the CPU
    are not checked.

    name, index_name: words for the message, the class and what the index counts, such as "row".
    """
    low, high = extremes_if_readable(index) or (0, 0)
    if low < 0 or high >= num_rows:
        invalid_index = high if high >= num_rows else low
        raise ValueError(
            f"{name}: {index_name} {invalid_index} is outside of the table, which has {num_rows} "
            "rows. Grow the table or shorten the input."
        )
