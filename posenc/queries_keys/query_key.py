"""What all encodings share that act at queries and keys."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from posenc.encoding.base import PositionEncoding
from posenc.encoding.boundary import check_pair
from posenc.encoding.claims import Claims
from posenc.positions import Positions


class QueryKeyEncoding(PositionEncoding):
    """Change q and k by their positions: a subclass defines `transform`."""

    claims = Claims(places=(2,), source="see the subclass")

    def forward(
        self,
        q: Float[Tensor, "batch num_heads len head_dim"],
        k: Float[Tensor, "batch num_kv_heads len head_dim"],
        positions: Positions,
    ) -> tuple[
        Float[Tensor, "batch num_heads len width"], Float[Tensor, "batch num_kv_heads len width"]
    ]:
        """What becomes of q and k of the same tokens."""
        pair = check_pair(type(self).__name__, q, k, positions, self.claims.num_axes)
        return self.transform(*pair)
