"""Multiply queries and keys at consecutive positions with a table of vectors by distance.

Products are computed only for distances at which the table changes, and read through skewed views;
beyond them a row has one value.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from posenc.encodings.terms.skew import Part, add_parts, skew
from posenc.encodings.terms.tokens import Tokens
from posenc.positions import shift_of_runs

Table = Callable[[Tensor], Tensor]
"""Function from distances (distances,) to vectors, (num_heads or 1, distances, width)."""

CachedTable = Callable[[Hashable, Callable[[], Tensor]], Tensor]
"""Function (key, compute) -> table: compute() or its cached result for this key."""

TILE_QUERIES, TILE_KEYS = 128, 64
"""Queries or keys per tile; numbers chosen. A tile of w keys needs the vectors of w + TILE_QUERIES
distances, one of w queries those of w + TILE_KEYS."""


@dataclass(frozen=True)
class Band:
    """Hold a table of vectors by distance, constant at distances >= `high`, and constant at
    distances <= `low`.

    values (num_heads or 1, distances, width) begins at distance `first` in steps of `step`, 1 or
    -1. It extends beyond `low` and `high` by as many distances as a block has queries.
    """

    values: Tensor
    first: int
    step: int
    low: int
    high: int

    def vectors_from(self, distance: int, count: int = 1) -> Tensor:
        """Return the vectors of `count` distances from `distance` on, in table order: (num_heads,
        count, width), or (count, width) if all heads share the table."""
        start = (distance - self.first) * self.step
        values = self.values[0] if len(self.values) == 1 else self.values
        return values.narrow(-2, start, count)

    def near_keys(self, shift: int, rows: int, keys: int) -> tuple[int, int]:
        """Return the range [first, last) of keys whose distance to some query is between `low` and
        `high`: earlier keys have the vector of `high`, later ones that of `low`. `shift`: position
        of the first query minus that of the first key."""
        first = min(max(shift - self.high + 1, 0), keys)
        return first, min(max(shift + rows - 1 - self.low, first), keys)


@dataclass(frozen=True)
class Bands:
    """Hold the tables that all blocks of one attention share. `shift` is the position of its first
    query minus that of its first key.

    `q_table` multiplies queries, with falling distances; `k_table` multiplies keys, with rising
    distances. `k_ends` are products of all keys with k_table at its lowest and at its highest
    distance, (batch, num_heads, 1, kv_len); None if no key is that far.
    """

    shift: int
    q_table: Band | None
    k_table: Band | None
    k_ends: tuple[Tensor | None, Tensor | None] = (None, None)

    @classmethod
    def build(
        cls,
        q: Tokens,
        k: Tokens,
        rows: int,
        causal: bool,
        ends: tuple[int, int] | None,
        q_table: Table | None = None,
        k_table: Table | None = None,
        k_vectors: Tensor | None = None,
        cached: CachedTable | None = None,
    ) -> "Bands | None":
        """Build the tables for blocks of at most `rows` queries; None unless positions are known to
        be consecutive.

        `ends` are the lowest and highest distance at which the tables change; None: no limit. If
        `causal`, blocks need no distance below -rows.
        """
        shift = shift_of_runs(q.where, k.where)
        if shift is None:
            return None
        # The distances of the first query to the last key, and of the last query to the first key.
        # In a causal block only keys that are hidden anyway are later than a query by `rows`.
        low = -rows if causal else shift + 1 - len(k)
        high = max(low, shift + len(q) - 1)
        if ends is not None:
            low = min(max(low, ends[0]), ends[1])
            high = min(max(high, ends[0]), ends[1])

        def band(table: Table | None, first: int, last: int, step: int) -> Band | None:
            """Return the band of a table at distances first, first + step, ..., last; None without
            a table."""
            if table is None:
                return None

            def compute() -> Tensor:
                distance = torch.arange(first, last + step, step, device=q.device)
                return table(distance.clamp(low, high))

            key = first, last, step, low, high, q.device
            return Band(
                compute() if cached is None else cached(key, compute), first, step, low, high
            )

        q_band = band(q_table, high + rows, low - rows, -1)
        k_band = band(k_table, low - rows, high + rows, 1)
        if k_band is None:
            return cls(shift, q_band, None)
        assert k_vectors is not None
        lowest = None
        highest = None
        # A block takes the vector of `low` for keys from shift + rows - 1 - low on, and that of
        # `high` for keys before shift - high + 1, see Band.near_keys. The first block begins to do
        # so earliest, and the last query gets the most keys at `high`.
        some_key_at_low = shift + min(rows, len(q)) - 1 - low < len(k)
        if some_key_at_low:
            lowest = k_band.vectors_from(low) @ k_vectors.mT
        some_key_at_high = shift + len(q) > high
        if some_key_at_high:
            highest = k_band.vectors_from(high) @ k_vectors.mT
        return cls(shift, q_band, k_band, (lowest, highest))

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
        shift = self.shift + rows.start - keys.start
        height, width = scores.shape[-2:]
        if self.q_table is not None:
            assert q_vectors is not None
            tiles = [
                _products_of_queries(self.q_table, shift + i * TILE_QUERIES, width, tile)
                for i, tile in enumerate(q_vectors.split(TILE_QUERIES, 2))
            ]
            scores = add_parts(scores, *tiles, rows=TILE_QUERIES)
        if self.k_table is not None:
            assert k_vectors is not None
            k_ends = [None if end is None else end[..., keys] for end in self.k_ends]
            parts = _products_of_keys(self.k_table, shift, height, width, k_vectors, k_ends)
            scores = add_parts(scores, parts)
        return scores

    def product(self, rows: slice, keys: slice, q_vectors: Tensor) -> Tensor | None:
        """Return what `add` adds, as a view of one matrix product; None if it needs several."""
        shift = self.shift + rows.start - keys.start
        width = keys.stop - keys.start
        height = q_vectors.shape[2]
        if self.q_table is None or self.k_table is not None or height > TILE_QUERIES:
            return None
        all_near = self.q_table.near_keys(shift, height, width) == (0, width)
        if not all_near:
            return None
        _, _, product = next(_products_of_queries(self.q_table, shift, width, q_vectors))
        return product


def _products_of_queries(table: Band, shift: int, keys: int, q: Tensor) -> Iterator[Part]:
    """Yield products of a block's queries with the vectors of their distances, in parts: keys with
    the vector of `high`, keys near enough for one of their own, keys with that of `low`."""
    rows = q.shape[2]
    first, last = table.near_keys(shift, rows, keys)
    if first:
        yield 0, first, q @ table.vectors_from(table.high).mT
    if first < last:
        near = table.vectors_from(shift + rows - 1 - first, rows + last - first)
        yield first, last, skew(q @ near.mT, last - first)
    if last < keys:
        yield last, keys, q @ table.vectors_from(table.low).mT


def _products_of_keys(
    table: Band, shift: int, rows: int, keys: int, k: Tensor, k_ends: list[Tensor | None]
) -> Iterator[Part]:
    """Yield products of a block's keys with the vectors of their distances, as
    `_products_of_queries` does; the near ones TILE_KEYS at a time."""
    first, last = table.near_keys(shift, rows, keys)
    if first:
        assert k_ends[1] is not None
        yield 0, first, k_ends[1][..., :first]
    for start in range(first, last, TILE_KEYS):
        stop = min(start + TILE_KEYS, last)
        rising = table.vectors_from(shift - stop + 1, stop - start + rows)
        yield start, stop, skew(k[:, :, start:stop] @ rising.mT, rows).mT
    if last < keys:
        assert k_ends[0] is not None
        yield last, keys, k_ends[0][..., last:]
