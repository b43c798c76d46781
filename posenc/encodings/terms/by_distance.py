"""Add products of queries, of keys or of both with vectors by distance to the scores."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.terms.bands import Bands, CachedTable, Table
from posenc.encodings.terms.term import ScoreMod, Scores, Shown, Term
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import distances, values_at


class ByDistance(Term):
    """Add products of queries, of keys or of both with a vector per distance to the scores.

    scores[i, j] += q_vectors[i] . q_table(D) + k_vectors[j] . k_table(D),  D = position_i -
    position_j

    At contiguous positions only the vectors of distances that occur are multiplied, and the
    products are read through skewed views. Otherwise, or if a block has more queries than there are
    vectors, all vectors are multiplied and the products gathered.

    Args:
        ends: (low, high); distances outside use the vector of the nearer end, and real distances
            are rounded down. None: no limit; positions must then be consecutive, or a subclass
            overrides `_add_at_any_positions` and `make_score_mod`, as Transformer-XL's does.
        q_vectors, q_table: (batch, num_heads, q_len, width), and a function from distances to
            (num_heads or 1, distances, width); or both None.
        k_vectors, k_table: the same for the keys.
        cached: cache of tables, a function (key, compute) -> table; None: compute them each time.
    """

    additive = True

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        ends: tuple[int, int] | None,
        q_vectors: Float[Tensor, "batch num_heads {len(q)} q_width"] | None = None,
        q_table: Table | None = None,
        k_vectors: Float[Tensor, "batch num_heads {len(k)} k_width"] | None = None,
        k_table: Table | None = None,
        cached: CachedTable | None = None,
    ) -> None:
        super().__init__(q, k)
        self.ends = ends
        self.q_vectors = q_vectors
        self.q_table = q_table
        self.k_vectors = k_vectors
        self.k_table = k_table
        self.cached = cached
        self.bands: Bands | None = None
        self._all_q: Tensor | None = None
        self._all_k: Tensor | None = None

    def prepare_blocks(self, rows: int, causal: bool) -> Self:
        if self._has_few_vectors(rows):
            bands = None
        else:
            tables = (self.q_table, self.k_table, self.k_vectors, self.cached)
            bands = Bands.build(self.q, self.k, rows, causal, self.ends, *tables)
        ready = self._with_all_vectors() if bands is None else self.copy()
        ready.bands = bands
        return ready

    def _has_few_vectors(self, rows: int) -> bool:
        """Return True if one block has all queries, and more of them than there are vectors."""
        if torch.compiler.is_compiling() or self.ends is None:  # a graph must not depend on lengths
            return False
        low, high = self.ends
        return high - low < len(self.q) <= rows

    def _with_all_vectors(self) -> Self:
        """Return a copy with the vectors of all distances from end to end, if there are ends."""
        ready = self.copy()
        if self.ends is not None:
            low, high = self.ends
            distance = torch.arange(low, high + 1, device=self.q.device)
            ready._all_q = None if self.q_table is None else self.q_table(distance)
            ready._all_k = None if self.k_table is None else self.k_table(distance)
        return ready

    def add(self, scores: Scores, rows: slice, keys: slice, mask: Shown | None) -> Scores:
        q = None if self.q_vectors is None else self.q_vectors[:, :, rows]
        k = None if self.k_vectors is None else self.k_vectors[:, :, keys]
        if self.bands is not None:
            return self.bands.add(scores, rows, keys, q, k)
        return self._add_at_any_positions(scores, self.q[rows], self.k[keys], q, k)

    def product(
        self, rows: slice, keys: slice
    ) -> Float[Tensor, "batch num_heads rows keys"] | None:
        """Return what `add` adds, as a view of one matrix product; None if it needs several."""
        if self.bands is None or self.q_vectors is None:
            return None
        return self.bands.product(rows, keys, self.q_vectors[:, :, rows])

    def _add_at_any_positions(
        self,
        scores: Tensor,
        q: Tokens,
        k: Tokens,
        q_vectors: Tensor | None,
        k_vectors: Tensor | None,
    ) -> Tensor:
        """Add the products to the scores at any positions: multiply q and k with the vectors of all
        distances, and gather for each pair the product of its distance."""
        assert self.ends is not None  # see the class
        low, high = self.ends
        column = _round_down(distances(q.positions, k.positions)).clamp(low, high) - low
        if column.ndim == 3:  # (batch, rows, keys)
            column = column[:, None]
        of_q, of_k = self._products_with_all_vectors(q_vectors, k_vectors)
        if of_q is not None:
            scores = scores + of_q.gather(-1, column.expand(scores.shape))
        if of_k is not None:
            shape = (*scores.shape[:2], scores.shape[-1], scores.shape[-2])
            scores = scores + of_k.gather(-1, column.mT.expand(shape)).mT
        return scores

    def _products_with_all_vectors(
        self, q: Tensor | None, k: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return products with the vectors of all distances: (batch, num_heads, len, distances)."""
        return (
            None if q is None or self._all_q is None else q @ self._all_q.mT,
            None if k is None or self._all_k is None else k @ self._all_k.mT,
        )

    def make_score_mod(self) -> ScoreMod:  # type: ignore[override]
        ready = self._with_all_vectors()
        q_products, k_products = ready._products_with_all_vectors(self.q_vectors, self.k_vectors)
        q_positions = self.q.positions
        kv_positions = self.k.positions
        assert self.ends is not None
        # Tensors, because a compiled score_mod would contain numbers as constants.
        low, high = (torch.full((), end, device=self.q.device) for end in self.ends)

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            """Return the score of a pair plus its products with the vectors of its distance."""
            distance = values_at(q_positions, batch, q_idx) - values_at(kv_positions, batch, kv_idx)
            row = _round_down(distance).clamp(low, high) - low
            if q_products is not None:
                score = score + q_products[batch, head, q_idx, row]
            if k_products is not None:
                score = score + k_products[batch, head, kv_idx, row]
            return score

        return mod


def _round_down(distance: Tensor) -> Tensor:
    """Return distances as integers: real ones rounded down, -0.5 -> -1."""
    return distance.floor().long() if distance.is_floating_point() else distance
