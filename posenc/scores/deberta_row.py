"""What DeBERTa adds to the scores of one query on the CPU: rows that occur, and no vector for each
distance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from posenc.numbers import native
from posenc.numbers.heads import for_every_head
from posenc.terms.dense import Dense
from posenc.terms.tokens import Tokens

if TYPE_CHECKING:
    from posenc.scores.deberta import DeBERTa

SOURCE = Path(__file__).with_name("deberta_row.c")
FUNCTION = "add_to_one"


class OneQuery(Dense):
    """The products of the query with the rows of its distances, and of each key with its row."""

    def __init__(self, encoding: DeBERTa, q: Tokens, k: Tokens, dtype: torch.dtype) -> None:
        super().__init__(q, k, self._of_block)
        self._encoding, self._dtype = encoding, dtype
        assert q.x is not None
        plain = q.x.dtype == torch.float32 and k.x is not None and k.x.stride(-1) == 1
        if encoding.p2c and plain and native.load(SOURCE, (FUNCTION,)) is not None:
            self.fold = self._folded

    def _of_block(self, q: Tokens, k: Tokens) -> Tensor:
        """(batch, num_heads, 1, keys)"""
        assert q.x is not None
        encoding, distance = self._encoding, q.positions - k.positions
        values = q.x.new_zeros(1, dtype=self._dtype)
        if encoding.c2p:
            row = encoding.row(distance)
            scores, low = self._of_query(q.x, row)
            first = _as_the_first(row)
            shared = scores[..., int(row[0]) - low, None].expand(*scores.shape[:-1], first)
            values = torch.cat([shared, scores.index_select(-1, row[first:] - low)], -1)
        if encoding.p2c:
            assert k.x is not None
            values = values + self._of_keys(k.x.to(self._dtype), encoding._k_row(distance))
        return values

    def _folded(self, scale: float) -> tuple[Tensor, Tensor]:
        encoding, keys, query = self._encoding, self.k.x, self.q.x
        assert keys is not None and query is not None
        distance = self.q.positions - self.k.positions
        row, scores = encoding.row(distance), None
        if encoding.c2p:
            scores, q_low = self._of_query(query, row)
            scores, q_row = scores.contiguous(), row - q_low
        else:
            q_row = row
        k_row = encoding._k_row(distance) if encoding.paper_p2c else row
        vectors, k_low = self._vectors(k_row)
        k_row = k_row - k_low
        heads, _, width = vectors.shape
        bias, far = query.new_empty(*query.shape[:3], len(self.k)), query.new_empty(heads, 1, width)
        sizes = (
            heads,
            len(self.k),
            0 if scores is None else scores.shape[-1],
            vectors.shape[1],
            width,
        )
        function: Any = getattr(native.load(SOURCE, (FUNCTION,)), FUNCTION)
        native.run(
            function, bias.shape[0] * heads, bias, far, scores, q_row, keys, keys.stride()[:3],
            vectors, k_row, float(encoding.scale(encoding.head_dim)), *sizes,
        )  # fmt: skip
        return far / scale, bias

    def _of_query(self, query: Tensor, row: Int[Tensor, " keys"]) -> tuple[Tensor, int]:
        """The query's scaled products with what the rows low .. of the table become, read from
        those of the table itself; and low."""
        encoding = self._encoding
        query = encoding.scale(encoding.head_dim) * query.to(self._dtype)
        projection = encoding._projections()[1]
        assert projection is not None
        low, high = (int(end) for end in row.aminmax())
        scores = query @ self._by_head(projection.weight)
        scores = scores @ encoding._rows(slice(low, high + 1), query.dtype).mT
        if projection.bias is not None:
            scores = scores + query @ self._by_head(projection.bias[:, None])
        return scores, low

    def _of_keys(self, keys: Tensor, row: Int[Tensor, " keys"]) -> Tensor:
        """Each key's product with its row: the first that share one, most of a long past, are one
        product."""
        vectors, low = self._vectors(row)
        first = _as_the_first(row)
        shared = vectors[:, int(row[0]) - low, None] @ keys[:, :, :first].mT
        each = (keys[:, :, first:] * vectors.index_select(1, row[first:] - low)).sum(-1)
        encoding = self._encoding
        return encoding.scale(encoding.head_dim) * torch.cat([shared, each[:, :, None]], -1)

    def _vectors(self, row: Int[Tensor, " keys"]) -> tuple[Tensor, int]:
        """(num_heads, rows, head_dim) of the rows low .. of the table, and low."""
        encoding, dtype = self._encoding, self._dtype
        projection = encoding._projections()[0]
        assert projection is not None
        span, norm = encoding.span, encoding.norm
        low = span if bool((row >= span).all()) else 0  # the past needs half of the table
        given = () if norm is None else (norm.weight, norm.bias)
        vectors = encoding._kept(
            (projection, low, dtype),
            lambda: encoding._projected(
                projection, torch.arange(low, 2 * span), dtype
            ).contiguous(),
            projection.weight, projection.bias, encoding.table[low:], *given,
        )  # fmt: skip
        return vectors, low

    def _by_head(self, weight: Tensor) -> Tensor:
        """(num_heads, head_dim, ...): a projection of fewer heads serves its groups."""
        encoding = self._encoding
        heads = weight.to(self._dtype).unflatten(0, (-1, encoding.head_dim))
        return for_every_head(heads, encoding.num_heads, dim=0)


def _as_the_first(row: Int[Tensor, " keys"]) -> int:
    """How many keys from the first on have its row."""
    other = (row != row[0]).numpy()
    return int(other.argmax()) if other.any() else len(row)
