"""Base class of encodings that change queries and keys."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.check_inputs import heads_first, query_and_key_tokens
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import PositionEncoding
from posenc.positions import Positions


class QueryKeyEncoding(PositionEncoding):
    """Base class of encodings that change q and k by their positions; a subclass defines
    `transform`."""

    claims = Claims(places=(2,), source="see the subclass")

    @explain_misfits
    def forward(
        self,
        q: Float[Tensor, "batch _ _ head_dim"],
        k: Float[Tensor, "batch _ _ head_dim"],
        positions: Positions,
        *,
        layout: str = "bhtd",
    ) -> tuple[Float[Tensor, "batch _ _ width"], Float[Tensor, "batch _ _ width"]]:
        """Return q and k of the same tokens, transformed, for use outside of posenc.attention.

        q (batch, num_heads, len, head_dim) and k (batch, num_kv_heads, len, head_dim) may come back
        wider. With layout="bthd" axes 1 and 2 are swapped in arguments and results.
        Raises: TypeError or ValueError for vectors, positions or a layout that do not fit.
        """
        caller = type(self).__name__
        q, k = heads_first(caller, layout, q, k)
        new_q, new_k = self.transform(
            *query_and_key_tokens(caller, q, k, positions, self.claims.num_axes)
        )
        return heads_first(caller, layout, new_q, new_k)


def check_keys(encoding: Any, k: Tensor) -> None:
    """Raise ValueError unless k (batch, heads, len, width) has num_kv_heads heads of head_dim."""
    if k.shape[1] != encoding.num_kv_heads or k.shape[-1] != encoding.head_dim:
        raise ValueError(
            f"{type(encoding).__name__}: built for {encoding.num_kv_heads} key/value heads of "
            f"{encoding.head_dim}, got k with shape {tuple(k.shape)}."
        )
