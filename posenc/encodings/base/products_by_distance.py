"""Add products of queries, of keys or of both with vectors by distance to the scores.

At consecutive positions, products are computed only for the distances that occur and at which the
table changes; `skew` views them as scores. Beyond these distances all keys of a query have the same
product. At other positions the products with all vectors are computed, and gathered for each pair.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.encodings.base.term import ScoreMod, Scores, Term, Tokens, VisiblePairs
from posenc.encodings.numerics.tensor_views import ScoreColumns, add_columns, skew
from posenc.positions.tokens import distances, offset_of_first_query, values_at

TableReader = Callable[[Tensor], Tensor]
"""Function that reads a table: distances (distances,) -> vectors (num_heads or 1, distances,
width)."""

CachingFunction = Callable[[Hashable, Callable[[], Tensor]], Tensor]
"""Function (key, compute) -> table, which returns compute() or its cached result for this key."""

TILE_QUERIES, TILE_KEYS = 128, 64
"""Number of queries, or of keys, per tile; both are chosen. A tile of w keys needs the vectors of w
+ TILE_QUERIES distances, one of w queries those of w + TILE_KEYS."""


@dataclass(frozen=True)
class Band:
    """Hold a table of vectors by distance. The vector is the same for all distances of at least
    `high`, and for all of at most `low`. Pairs at distances between the two form a band along the
    diagonal of the scores.

    vectors: (num_heads or 1, distances, width); the first is for `first_distance`, and the distance
        changes by `step`, 1 or -1, from one vector to the next. There are as many vectors beyond
        `low` and beyond `high` as a block has queries.
    """

    vectors: Tensor
    first_distance: int
    step: int
    low: int
    high: int

    def vectors_from(self, distance: int, count: int = 1) -> Tensor:
        """Return the vectors of `count` distances, beginning with `distance`, in the order of the
        table: (num_heads, count, width), or (count, width) if all heads share the table."""
        start = (distance - self.first_distance) * self.step
        heads_share_table = len(self.vectors) == 1
        vectors = self.vectors[0] if heads_share_table else self.vectors
        return vectors.narrow(-2, start, count)

    def near_keys(self, query_offset: int, num_rows: int, num_keys: int) -> tuple[int, int]:
        """Return (kv_start, kv_stop): keys [kv_start, kv_stop) of a block are those whose distance
        to at least one of its queries is strictly between `low` and `high`. For earlier keys all
        queries have the vector of `high`, and for later ones that of `low`.

        query_offset: position of the first query minus that of the first key. num_rows, num_keys:
        numbers of queries and of keys in the block.
        """
        kv_start = min(max(query_offset - self.high + 1, 0), num_keys)
        return kv_start, min(max(query_offset + num_rows - 1 - self.low, kv_start), num_keys)


@dataclass(frozen=True)
class Bands:
    """Hold the vectors by distance, and products with them, that all blocks of one attention share.

    q_band, k_band: the vectors with which queries, and keys, are multiplied. Distances fall in
        q_band and rise in k_band.
    k_products_at_ends: products of all keys with the vectors of k_band at its lowest and at its
        highest distance, each (batch, num_heads, 1, kv_len); None if no key is that far.
    query_offset: position of the first query minus that of the first key.
    """

    query_offset: int
    q_band: Band | None
    k_band: Band | None
    k_products_at_ends: tuple[Tensor | None, Tensor | None] = (None, None)

    @classmethod
    def build(
        cls,
        q: Tokens,
        k: Tokens,
        max_rows: int,
        causal: bool,
        ends: tuple[int, int] | None,
        read_q_table: TableReader | None = None,
        read_k_table: TableReader | None = None,
        k_vectors: Tensor | None = None,
        table_cache: CachingFunction | None = None,
    ) -> "Bands | None":
        """Build the tables for blocks of at most `max_rows` queries; return None unless positions
        are known to be consecutive.

        ends: the lowest and the highest distance at which the tables change; None: no limit.
        causal: True if blocks need no distance below -max_rows.
        read_q_table, read_k_table, k_vectors, table_cache: as in ProductsByDistance.
        """
        query_offset = offset_of_first_query(q.positions_or_range, k.positions_or_range)
        if query_offset is None:
            return None
        low, high = _lowest_and_highest_distance(
            query_offset, len(q), len(k), max_rows, causal, ends
        )

        def make_band(
            read_table: TableReader | None, first_distance: int, last_distance: int, step: int
        ) -> Band | None:
            """Return the band with the vectors at distances first_distance, first_distance + step,
            ..., last_distance, which `read_table` returns; None if `read_table` is None."""
            if read_table is None:
                return None

            def compute() -> Tensor:
                distance = torch.arange(first_distance, last_distance + step, step, device=q.device)
                return read_table(distance.clamp(low, high))

            key = first_distance, last_distance, step, low, high, q.device
            return Band(
                compute() if table_cache is None else table_cache(key, compute),
                first_distance,
                step,
                low,
                high,
            )

        q_band = make_band(read_q_table, high + max_rows, low - max_rows, -1)
        k_band = make_band(read_k_table, low - max_rows, high + max_rows, 1)
        if k_band is None:
            return cls(query_offset, q_band, None)
        assert k_vectors is not None
        products_at_low = None
        products_at_high = None
        # A block takes the vector of `low` for keys from query_offset + max_rows - 1 - low on, and
        # that of `high` for keys before query_offset - high + 1, see Band.near_keys. The first
        # block begins to do so earliest, and the last query gets the most keys at `high`.
        some_key_at_low = query_offset + min(max_rows, len(q)) - 1 - low < len(k)
        if some_key_at_low:
            products_at_low = k_band.vectors_from(low) @ k_vectors.mT
        some_key_at_high = query_offset + len(q) > high
        if some_key_at_high:
            products_at_high = k_band.vectors_from(high) @ k_vectors.mT
        return cls(query_offset, q_band, k_band, (products_at_low, products_at_high))

    def add(
        self,
        scores: Tensor,
        rows: slice,
        keys: slice,
        q_vectors: Tensor | None,
        k_vectors: Tensor | None,
    ) -> Tensor:
        """Add products with the block's query vectors (batch, num_heads, rows, width) and key
        vectors (batch, num_heads, keys, width) to its scores, in place.

        scores[i, j] += q_vectors[i] . q_table[D] + k_vectors[j] . k_table[D],
        D = position_i - position_j
        """
        query_offset = self.query_offset + rows.start - keys.start
        num_rows, num_keys = scores.shape[-2:]
        if self.q_band is not None:
            assert q_vectors is not None
            tiles = [
                _products_of_queries(
                    self.q_band, query_offset + i * TILE_QUERIES, num_keys, tile_vectors
                )
                for i, tile_vectors in enumerate(q_vectors.split(TILE_QUERIES, 2))
            ]
            scores = add_columns(scores, *tiles, rows_per_tile=TILE_QUERIES)
        if self.k_band is not None:
            assert k_vectors is not None
            k_products_at_ends = [
                None if products_at_end is None else products_at_end[..., keys]
                for products_at_end in self.k_products_at_ends
            ]
            k_parts = _products_of_keys(
                self.k_band, query_offset, num_rows, num_keys, k_vectors, k_products_at_ends
            )
            scores = add_columns(scores, k_parts)
        return scores

    def product(self, rows: slice, keys: slice, q_vectors: Tensor) -> Tensor | None:
        """Return what `add` would add to the scores, (batch, num_heads, rows, keys), as a view of
        one matrix product; None if it takes several products."""
        query_offset = self.query_offset + rows.start - keys.start
        num_keys = keys.stop - keys.start
        num_rows = q_vectors.shape[2]
        if self.q_band is None or self.k_band is not None or num_rows > TILE_QUERIES:
            return None
        all_keys_are_near = self.q_band.near_keys(query_offset, num_rows, num_keys) == (0, num_keys)
        if not all_keys_are_near:
            return None
        _, _, product = next(_products_of_queries(self.q_band, query_offset, num_keys, q_vectors))
        return product


def _lowest_and_highest_distance(
    query_offset: int,
    q_len: int,
    kv_len: int,
    num_rows: int,
    causal: bool,
    ends: tuple[int, int] | None,
) -> tuple[int, int]:
    """Return the lowest and the highest distance, within `ends`, for which blocks of `num_rows`
    queries need a vector of its own. query_offset: position of the first query minus that of the
    first key."""
    # From the first query to the last key. In a causal block only keys that are hidden anyway are
    # later than a query by `num_rows`.
    low = -num_rows if causal else query_offset + 1 - kv_len
    # From the last query to the first key.
    high = max(low, query_offset + q_len - 1)
    # Distances beyond an end have its vector.
    if ends is not None:
        low = min(max(low, ends[0]), ends[1])
        high = min(max(high, ends[0]), ends[1])
    return low, high


def _products_of_queries(
    band: Band, query_offset: int, num_keys: int, q_vectors: Tensor
) -> Iterator[ScoreColumns]:
    """Yield the products of a block's queries with the vectors of their distances to keys, as
    columns of scores in at most three parts: keys with the vector of `high`, keys that
    `band.near_keys` returns, and keys with the vector of `low`.

    query_offset: position of the first query minus that of the first key. q_vectors: query vectors
    (batch, num_heads, rows, width).
    """
    num_rows = q_vectors.shape[2]
    kv_start, kv_stop = band.near_keys(query_offset, num_rows, num_keys)
    if kv_start:
        yield 0, kv_start, q_vectors @ band.vectors_from(band.high).mT
    if kv_start < kv_stop:
        # One vector more than there are distances: `skew` takes rows of that length, see there.
        near_vectors = band.vectors_from(
            query_offset + num_rows - 1 - kv_start, num_rows + kv_stop - kv_start
        )
        yield kv_start, kv_stop, skew(q_vectors @ near_vectors.mT, kv_stop - kv_start)
    if kv_stop < num_keys:
        yield kv_stop, num_keys, q_vectors @ band.vectors_from(band.low).mT


def _products_of_keys(
    band: Band,
    query_offset: int,
    num_rows: int,
    num_keys: int,
    k_vectors: Tensor,
    k_products_at_ends: list[Tensor | None],
) -> Iterator[ScoreColumns]:
    """Yield the products of a block's keys with the vectors of their distances to queries, as
    columns of scores in the three parts that `_products_of_queries` yields, with TILE_KEYS near
    keys at a time.

    query_offset: position of the first query minus that of the first key. k_vectors: key vectors
    (batch, num_heads, keys, width). k_products_at_ends: as in Bands, for the keys of the block.
    """
    kv_start, kv_stop = band.near_keys(query_offset, num_rows, num_keys)
    if kv_start:
        assert k_products_at_ends[1] is not None
        yield 0, kv_start, k_products_at_ends[1][..., :kv_start]
    for start in range(kv_start, kv_stop, TILE_KEYS):
        stop = min(start + TILE_KEYS, kv_stop)
        near_vectors = band.vectors_from(query_offset - stop + 1, stop - start + num_rows)
        yield start, stop, skew(k_vectors[:, :, start:stop] @ near_vectors.mT, num_rows).mT
    if kv_stop < num_keys:
        assert k_products_at_ends[0] is not None
        yield kv_stop, num_keys, k_products_at_ends[0][..., kv_stop:]


class ProductsByDistance(Term):
    """Add products of queries, of keys or of both with a vector per distance to the scores.

    scores[i, j] += q_vectors[i] . read_q_table(D) + k_vectors[j] . read_k_table(D),
    D = position_i - position_j

    At consecutive positions only the vectors of distances that occur are multiplied, and `skew`
    views the products as scores. Otherwise, or if a block has more queries than there are vectors,
    all vectors are multiplied and the products gathered for each pair.

    Args:
        ends: (low, high); distances outside use the vector of the nearer end, and real distances
            are rounded down. None: no limit; positions must then be consecutive, or a subclass
            overrides `_add_at_any_positions` and `make_score_mod`, as Transformer-XL's does.
        q_vectors, read_q_table: (batch, num_heads, q_len, width), and a function from distances to
            (num_heads or 1, distances, width); or both None.
        k_vectors, read_k_table: the same for the keys.
        table_cache: function (key, compute) that returns compute() or its cached result for this
            key; None: tables are computed each time.
    """

    additive = True

    def __init__(
        self,
        q: Tokens,
        k: Tokens,
        ends: tuple[int, int] | None,
        q_vectors: Float[Tensor, "batch num_heads {len(q)} q_width"] | None = None,
        read_q_table: TableReader | None = None,
        k_vectors: Float[Tensor, "batch num_heads {len(k)} k_width"] | None = None,
        read_k_table: TableReader | None = None,
        table_cache: CachingFunction | None = None,
    ) -> None:
        super().__init__(q, k)
        self.ends = ends
        self.q_vectors = q_vectors
        self.read_q_table = read_q_table
        self.k_vectors = k_vectors
        self.read_k_table = read_k_table
        self.table_cache = table_cache
        self.bands: Bands | None = None
        self._q_table: Tensor | None = None
        self._k_table: Tensor | None = None

    def prepare_blocks(self, max_rows: int, causal: bool) -> Self:
        if self._is_one_block_with_few_vectors(max_rows):
            bands = None
        else:
            table_arguments = (
                self.read_q_table,
                self.read_k_table,
                self.k_vectors,
                self.table_cache,
            )
            bands = Bands.build(
                self.q_tokens, self.k_tokens, max_rows, causal, self.ends, *table_arguments
            )
        prepared = self._with_all_vectors() if bands is None else self.copy()
        prepared.bands = bands
        return prepared

    def _is_one_block_with_few_vectors(self, max_rows: int) -> bool:
        """Return True if one block, of `max_rows` queries, has all queries, and the table has no
        more vectors, from the one end to the other, than there are queries."""
        if torch.compiler.is_compiling() or self.ends is None:  # a graph must not depend on lengths
            return False
        low, high = self.ends
        return high - low < len(self.q_tokens) <= max_rows

    def _with_all_vectors(self) -> Self:
        """Return a copy that has read the vectors of all distances from one end to the other, if
        there are ends."""
        prepared = self.copy()
        if self.ends is not None:
            low, high = self.ends
            distance = torch.arange(low, high + 1, device=self.q_tokens.device)
            prepared._q_table = None if self.read_q_table is None else self.read_q_table(distance)
            prepared._k_table = None if self.read_k_table is None else self.read_k_table(distance)
        return prepared

    def add(self, scores: Scores, rows: slice, keys: slice, mask: VisiblePairs | None) -> Scores:
        """Return the scores of these rows and keys, plus their products with the vectors of their
        distances."""
        q_vectors = None if self.q_vectors is None else self.q_vectors[:, :, rows]
        k_vectors = None if self.k_vectors is None else self.k_vectors[:, :, keys]
        if self.bands is not None:
            return self.bands.add(scores, rows, keys, q_vectors, k_vectors)
        return self._add_at_any_positions(
            scores, self.q_tokens[rows], self.k_tokens[keys], q_vectors, k_vectors
        )

    def product(
        self, rows: slice, keys: slice
    ) -> Float[Tensor, "batch num_heads rows keys"] | None:
        """Return what `add` would add to the scores, as a view of one matrix product; None if it
        takes several products."""
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
        """Add the products to the scores, whatever the positions: multiply q_vectors and k_vectors
        with the vectors of all distances, and gather for each pair the product of its distance."""
        assert self.ends is not None  # see the class
        low, high = self.ends
        distance_index = _round_down(distances(q.positions, k.positions)).clamp(low, high) - low
        if distance_index.ndim == 3:  # (batch, rows, keys)
            distance_index = distance_index[:, None]
        q_products, k_products = self._products_with_all_vectors(q_vectors, k_vectors)
        if q_products is not None:
            scores = scores + q_products.gather(-1, distance_index.expand(scores.shape))
        if k_products is not None:
            shape = (*scores.shape[:2], scores.shape[-1], scores.shape[-2])
            scores = scores + k_products.gather(-1, distance_index.mT.expand(shape)).mT
        return scores

    def _products_with_all_vectors(
        self, q_vectors: Tensor | None, k_vectors: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the products of the query vectors and of the key vectors, each (batch, num_heads,
        len, width) or None, with the vectors of all distances: (batch, num_heads, len, distances)
        or None."""
        return (
            None if q_vectors is None or self._q_table is None else q_vectors @ self._q_table.mT,
            None if k_vectors is None or self._k_table is None else k_vectors @ self._k_table.mT,
        )

    def make_score_mod(self) -> ScoreMod:  # type: ignore[override]
        prepared = self._with_all_vectors()
        q_products, k_products = prepared._products_with_all_vectors(self.q_vectors, self.k_vectors)
        q_positions = self.q_tokens.positions
        kv_positions = self.k_tokens.positions
        assert self.ends is not None
        # Tensors, because a compiled score_mod would contain numbers as constants.
        low, high = (torch.full((), end, device=self.q_tokens.device) for end in self.ends)

        def mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor):
            """Return the score of a pair plus its products with the vectors of its distance."""
            distance = values_at(q_positions, batch, q_idx) - values_at(kv_positions, batch, kv_idx)
            distance_index = _round_down(distance).clamp(low, high) - low
            if q_products is not None:
                score = score + q_products[batch, head, q_idx, distance_index]
            if k_products is not None:
                score = score + k_products[batch, head, kv_idx, distance_index]
            return score

        return mod


def _round_down(distance: Tensor) -> Tensor:
    """Return distances as integers: real ones rounded down, -0.5 -> -1."""
    return distance.floor().long() if distance.is_floating_point() else distance
