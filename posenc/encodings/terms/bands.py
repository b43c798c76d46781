"""Terms that read a table by distance, where queries and keys are consecutive positions.

Only distances at which the table changes need products, read through skewed views; beyond them one
number serves a whole row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.encodings.terms.skew import Part, add_parts, shared_run, skew
from posenc.encodings.terms.tokens import Tokens

Table = Callable[[Tensor], Tensor]
"""From distances to (num_heads or 1, distances, width)."""

Keep = Callable[[Hashable, Callable[[], Tensor]], Tensor]
"""From a key and what computes a table to the table."""

QUERIES, KEYS = 128, 64
"""Queries or keys whose products with the table are made at a time: each needs the vectors of as
many distances more."""


@dataclass(frozen=True)
class Band:
    """A table by distance that is constant from `high` on, and again up to `low`.

    values (num_heads or 1, distances, width) begins at distance `first` and goes on by `step`, 1 or
    -1; it has as many distances beyond `low` and beyond `high` as a block has queries.
    """

    values: Tensor
    first: int
    step: int
    low: int
    high: int

    def __getitem__(self, distances: tuple[int, int]) -> Tensor:
        """Return `count` entries from `distance` on, in the order of the table; without the axis of
        heads where they share the table, since that makes one product for all of them."""
        distance, count = distances
        start = (distance - self.first) * self.step
        values = self.values[0] if len(self.values) == 1 else self.values
        return values.narrow(-2, start, count)

    def near(self, shift: int, rows: int, keys: int) -> tuple[int, int]:
        """Return first, last: keys before `first` are at `high` or beyond for every query, those
        from `last` on at `low` or beyond. `shift` is the distance of the first query to the first
        key."""
        first = min(max(shift - self.high + 1, 0), keys)
        return first, min(max(shift + rows - 1 - self.low, first), keys)


@dataclass(frozen=True)
class Bands:
    """What the blocks of one attention share: a band that queries are multiplied with, by falling
    distance, and one for the keys, by rising distance; k_ends are the keys' products with its
    lowest and highest entry, (batch, num_heads, 1, kv_len), or None where no key is that far."""

    kv_start: int
    for_q: Band | None
    for_k: Band | None
    k_ends: tuple[Tensor | None, Tensor | None] = (None, None)

    @classmethod
    def of(
        cls,
        q: Tokens,
        k: Tokens,
        rows: int,
        causal: bool,
        ends: tuple[int, int] | None,
        for_q: Table | None = None,
        for_k: Table | None = None,
        k_vectors: Tensor | None = None,
        kept: Keep | None = None,
    ) -> Bands | None:
        """Return the tables for blocks of at most `rows` queries; None where positions are not
        known to be consecutive.

        `ends` are the lowest and highest distance at which the tables change; None: they always do.
        If `causal`, the blocks ask for no distance below -rows.
        """
        shift = shared_run(q, k)
        if shift is None:
            return None
        low = -rows if causal else shift + 1 - len(k)
        high = max(low, shift + len(q) - 1)
        if ends is not None:
            low, high = (min(max(x, ends[0]), ends[1]) for x in (low, high))

        def band(table: Table | None, first: int, last: int, step: int) -> Band | None:
            if table is None:
                return None

            def compute() -> Tensor:
                distance = torch.arange(first, last + step, step, device=q.device)
                return table(distance.clamp(low, high))

            key = first, last, step, low, high, q.device
            return Band(compute() if kept is None else kept(key, compute), first, step, low, high)

        kv_start = k.where.start  # type: ignore[union-attr]
        q_band = band(for_q, high + rows, low - rows, -1)
        k_band = band(for_k, low - rows, high + rows, 1)
        if k_band is None:
            return cls(kv_start, q_band, None)
        assert k_vectors is not None
        at_low = shift + min(rows, len(q)) - 1 - low < len(k)
        lowest = k_band[low, 1] @ k_vectors.mT if at_low else None
        highest = k_band[high, 1] @ k_vectors.mT if shift + len(q) > high else None
        return cls(kv_start, q_band, k_band, (lowest, highest))

    def add(
        self, scores: Tensor, q: Tokens, k: Tokens, q_vectors: Tensor | None,
        k_vectors: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """Return the scores of a block, with its query vectors (batch, num_heads, rows, width) and
        key vectors (batch, num_heads, keys, width) applied, in place.

        scores[i, j] += q_vectors[i] . for_q[D] + k_vectors[j] . for_k[D],
        D = position_i - position_j
        """
        shift = _shift(q, k)
        rows, keys = scores.shape[-2:]
        if self.for_q is not None:
            assert q_vectors is not None
            tiles = [
                _of_queries(self.for_q, shift + i * QUERIES, keys, tile)
                for i, tile in enumerate(q_vectors.split(QUERIES, 2))
            ]
            scores = add_parts(scores, *tiles, rows=QUERIES)
        if self.for_k is not None:
            assert k_vectors is not None
            first = k.where.start - self.kv_start  # type: ignore[union-attr]
            k_ends = [None if end is None else end.narrow(-1, first, keys) for end in self.k_ends]
            scores = add_parts(scores, _of_keys(self.for_k, shift, rows, keys, k_vectors, k_ends))
        return scores

    def weigh(self, weights: Tensor, q: Tokens, k: Tokens) -> Tensor:
        """Return sum over j of weights[i, j] * for_q[position_i - position_j]: (batch, num_heads,
        rows, width)."""
        shift = _shift(q, k)
        tiles = enumerate(weights.split(QUERIES, -2))
        outs = [self._weigh(tile, shift + i * QUERIES) for i, tile in tiles]
        return outs[0] if len(outs) == 1 else torch.cat(outs, -2)

    def _weigh(self, weights: Tensor, shift: int) -> Tensor:
        table = self.for_q
        assert table is not None
        rows, keys = weights.shape[-2:]
        first, last = table.near(shift, rows, keys)
        out = weights[..., :first].sum(-1, keepdim=True) * table[table.high, 1]
        if first < last:
            # The inverse of skew: row i moves rows - 1 - i columns to the right.
            moved = F.pad(weights[..., first:last], (0, rows - 1)).flatten(-2)
            moved = F.pad(moved, (rows - 1, 1)).unflatten(-1, (rows, rows + last - first))
            out = out + moved @ table[shift + rows - 1 - first, rows + last - first]
        if last < keys:
            out = out + weights[..., last:].sum(-1, keepdim=True) * table[table.low, 1]
        return out


def _shift(q: Tokens, k: Tokens) -> int:
    """Return the distance of a block's first query to its first key."""
    shift = shared_run(q, k)
    assert shift is not None  # a part of consecutive positions is consecutive
    return shift


def _of_queries(table: Band, shift: int, keys: int, q: Tensor) -> Iterator[Part]:
    rows = q.shape[2]
    first, last = table.near(shift, rows, keys)
    if first:
        yield 0, first, q @ table[table.high, 1].mT
    if first < last:
        start, count = shift + rows - 1 - first, rows + last - first
        yield first, last, skew(q @ table[start, count].mT, last - first)
    if last < keys:
        yield last, keys, q @ table[table.low, 1].mT


def _of_keys(
    table: Band, shift: int, rows: int, keys: int, k: Tensor, k_ends: list[Tensor | None]
) -> Iterator[Part]:
    first, last = table.near(shift, rows, keys)
    if first:
        assert k_ends[1] is not None
        yield 0, first, k_ends[1][..., :first]
    for start in range(first, last, KEYS):
        stop = min(start + KEYS, last)
        rising = table[shift - stop + 1, stop - start + rows]
        yield start, stop, skew(k[:, :, start:stop] @ rising.mT, rows).mT
    if last < keys:
        assert k_ends[0] is not None
        yield last, keys, k_ends[0][..., last:]
