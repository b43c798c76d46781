"""Terms that read a table by distance, where queries and keys are runs of positions. Only distances
at which the table changes need products, read through skewed views; beyond them one number serves a
whole row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.numbers.tracking import watched
from posenc.positions import run_start
from posenc.terms import products
from posenc.terms.skew import Part, add_parts, shared_run, skew

Table = Callable[[Tensor], Tensor]
"""From distances to (num_heads or 1, distances, width)."""

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
        """`count` entries from `distance` on, in the order of the table; without the axis of heads
        where they share the table, since that makes one product for all of them."""
        distance, count = distances
        start = (distance - self.first) * self.step
        values = self.values[0] if len(self.values) == 1 else self.values
        return values.narrow(-2, start, count)

    def columns(self, distance: int, count: int) -> Tensor:
        """The same entries as (num_heads or 1, width, count)."""
        return self.values.mT.narrow(-1, (distance - self.first) * self.step, count)

    def near(self, shift: int, rows: int, keys: int) -> tuple[int, int]:
        """first, last: keys before `first` are at `high` or beyond for every query, those from
        `last` on at `low` or beyond. `shift` is the distance of the first query to the first
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
        q_positions: Tensor,
        kv_positions: Tensor,
        rows: int,
        causal: bool,
        ends: tuple[int, int] | None,
        for_q: Table | None = None,
        for_k: Table | None = None,
        k: Tensor | None = None,
    ) -> Bands | None:
        """The tables for blocks of at most `rows` queries; None where positions are not known to
        be runs.

        `ends` are the lowest and highest distance at which the tables change; None: they always do.
        If `causal`, the blocks ask for no distance below -rows.
        """
        shift, kv_start = shared_run(q_positions, kv_positions), run_start(kv_positions)
        if shift is None or kv_start is None:
            return None
        low = -rows if causal else shift + 1 - kv_positions.shape[-1]
        high = max(low, shift + q_positions.shape[-1] - 1)
        if ends is not None:
            low, high = (min(max(x, ends[0]), ends[1]) for x in (low, high))

        def band(table: Table | None, first: int, last: int, step: int) -> Band | None:
            if table is None:
                return None
            distance = torch.arange(first, last + step, step, device=q_positions.device)
            values = table(distance.clamp(low, high))
            if not watched():  # distances side by side for C, and no worse for torch
                values = values.mT.contiguous().mT
            return Band(values, first, step, low, high)

        q_band = band(for_q, high + rows, low - rows, -1)
        k_band = band(for_k, low - rows, high + rows, 1)
        if k_band is None:
            return cls(kv_start, q_band, None)
        assert k is not None
        kv_len, q_len = kv_positions.shape[-1], q_positions.shape[-1]
        at_low = shift + min(rows, q_len) - 1 - low < kv_len
        lowest = k_band[low, 1] @ k.mT if at_low else None
        highest = k_band[high, 1] @ k.mT if shift + q_len > high else None
        return cls(kv_start, q_band, k_band, (lowest, highest))

    def add(
        self,
        scores: Tensor,
        q_positions: Tensor,
        kv_positions: Tensor,
        q: Tensor | None,
        k: Tensor | None,
    ) -> Tensor:
        """Scores of a block, with its queries (batch, num_heads, rows, width) and keys (batch,
        num_heads, keys, width) applied, in place.

        scores[i, j] += q[i] . for_q[D] + k[j] . for_k[D],  D = position_i - position_j
        """
        shift = _shift(q_positions, kv_positions)
        rows, keys = scores.shape[-2:]
        if self.for_q is not None:
            assert q is not None
            into = scores if products.applies(scores, q, self.for_q.values) else None
            size = QUERIES if into is None else rows
            tiles = [
                _of_queries(self.for_q, shift + i * size, keys, tile, into)
                for i, tile in enumerate(q.split(size, 2))
            ]
            scores = add_parts(scores, *tiles, rows=size)
        if self.for_k is not None:
            assert k is not None
            into = scores if products.applies(scores, k, self.for_k.values) else None
            first = run_start(kv_positions) - self.kv_start  # type: ignore[operator]
            k_ends = [None if end is None else end.narrow(-1, first, keys) for end in self.k_ends]
            scores = add_parts(scores, _of_keys(self.for_k, shift, rows, keys, k, k_ends, into))
        return scores

    def weigh(self, weights: Tensor, q_positions: Tensor, kv_positions: Tensor) -> Tensor:
        """sum over j of weights[i, j] * for_q[position_i - position_j]: (batch, num_heads, rows,
        width)."""
        shift = _shift(q_positions, kv_positions)
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


def _shift(q_positions: Tensor, kv_positions: Tensor) -> int:
    """The distance of a block's first query to its first key."""
    shift = shared_run(q_positions, kv_positions)
    assert shift is not None  # a part of a run is a run
    return shift


def _of_queries(
    table: Band, shift: int, keys: int, q: Tensor, into: Tensor | None
) -> Iterator[Part]:
    """What is added; C adds what belongs to near distances to `into`, if there is one."""
    rows = q.shape[2]
    first, last = table.near(shift, rows, keys)
    if first:
        yield 0, first, q @ table[table.high, 1].mT
    start, count = shift + rows - 1 - first, rows + last - first
    if into is not None and first < last:
        products.add(into, first, last, q, table.columns(start, count), "queries")
    elif first < last:
        yield first, last, skew(q @ table[start, count].mT, last - first)
    if last < keys:
        yield last, keys, q @ table[table.low, 1].mT


def _of_keys(
    table: Band, shift: int, rows: int, keys: int, k: Tensor, k_ends: list[Tensor | None],
    into: Tensor | None,
) -> Iterator[Part]:  # fmt: skip
    first, last = table.near(shift, rows, keys)
    if first:
        assert k_ends[1] is not None
        yield 0, first, k_ends[1][..., :first]
    if into is not None and first < last:
        rising = table.columns(shift - last + 1, rows + last - first)
        products.add(into, first, last, k[:, :, first:last], rising, "keys")
        first = last
    elif rows == 1 and first < last:  # each key meets one vector
        rising = table[shift - last + 1, last - first].flip(-2)
        yield first, last, (k[:, :, first:last] * rising).sum(-1).unsqueeze(-2)
        first = last
    for start in range(first, last, KEYS):
        stop = min(start + KEYS, last)
        rising = table[shift - stop + 1, stop - start + rows]
        yield start, stop, skew(k[:, :, start:stop] @ rising.mT, rows).mT
    if last < keys:
        assert k_ends[0] is not None
        yield last, keys, k_ends[0][..., last:]
