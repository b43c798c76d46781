"""Base class of encodings that add a vector to each embedding."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.check_inputs import validated_embedding_positions
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import Embedded, PositionEncoding
from posenc.encodings.numerics.precision import at_least_float32
from posenc.positions.tokens import as_tensor


class AddedEmbedding(PositionEncoding):
    """Base class of encodings that add a vector to each embedding; a subclass only defines
    `vectors`.

    x += vectors(positions)

    Precision: added in at least float32, returned in x's dtype.
    """

    claims = Claims(places=(1,), source="see the subclass", shift_invariant=False)

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim

    def vectors(
        self, positions: Real[Tensor, "..."], dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "*where {self.embed_dim}"]:
        """Return the vector to add at each position, in `dtype`: (..., embed_dim) for positions
        (...), or for (..., components) if positions have components. A subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define vectors(positions, dtype)")

    def embed(self, x: Embedded, positions: Real[Tensor, "..."]) -> Embedded:
        class_name = type(self).__name__
        num_axes = self.claims.num_axes
        checked_positions = validated_embedding_positions(
            class_name, x, positions, self.embed_dim, num_axes
        )
        positions = as_tensor(checked_positions, x.device)
        dtype = at_least_float32(x.dtype)
        return (x.to(dtype) + self.vectors(positions, dtype)).to(x.dtype)

    @explain_misfits
    def forward(self, x: Embedded, positions: Real[Tensor, "..."]) -> Embedded:
        return self.embed(x, positions)
