"""Scores that queries and keys read from tables of their own, by distance."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from posenc.positions import distances


class AddByDistance:
    """A score_mod that adds, to each pair, what the query's and the key's own tables hold at the
    pair's distance.

    score[b, h, i, j] += q_table[b, h, i, row(D)] + k_table[b, h, j, k_row(D)],  D = position_i -
    position_j

    Args:
        row, k_row: from integer distances to rows of the tables.
        q_table: (batch, num_heads, q_len, rows), or None.
        k_table: (batch, num_heads, kv_len, rows), or None.
    """

    def __init__(
        self,
        q_positions: Tensor,
        kv_positions: Tensor,
        row: Callable[[Tensor], Tensor],
        q_table: Tensor | None = None,
        k_table: Tensor | None = None,
        k_row: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.q_positions = _drop_single_batch(q_positions)
        self.kv_positions = _drop_single_batch(kv_positions)
        self.q_table, self.k_table = q_table, k_table
        self.row, self.k_row = row, row if k_row is None else k_row

    def __call__(
        self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor
    ) -> Tensor:
        distance = _take(self.q_positions, batch, q_idx) - _take(self.kv_positions, batch, kv_idx)
        if self.q_table is not None:
            score = score + self.q_table[batch, head, q_idx, self.row(distance)]
        if self.k_table is not None:
            score = score + self.k_table[batch, head, kv_idx, self.k_row(distance)]
        return score

    def block(self, scores: Tensor) -> Tensor:
        q_len, kv_len = scores.shape[-2:]
        distance = distances(self.q_positions, self.kv_positions)
        distance = distance if distance.ndim == 2 else distance[:, None]
        if self.q_table is not None:
            index = self.row(distance).expand(scores.shape)
            scores = scores + self.q_table.gather(-1, index)
        if self.k_table is not None:
            index = self.k_row(distance).mT.expand(*scores.shape[:2], kv_len, q_len)
            scores = scores + self.k_table.gather(-1, index).mT
        return scores


def require_whole(name: str, *positions: Tensor) -> None:
    """Raise TypeError where a method that counts whole tokens is given real positions."""
    for p in positions:
        if p.is_floating_point():
            raise TypeError(
                f"{name}: positions must be integers, because its table has a row per whole "
                f"distance; got {p.dtype}. Round them, or use a method that takes real positions."
            )


def _drop_single_batch(positions: Tensor) -> Tensor:
    return positions[0] if positions.ndim == 2 and positions.shape[0] == 1 else positions


def _take(positions: Tensor, batch: Tensor, index: Tensor) -> Tensor:
    return positions[index] if positions.ndim == 1 else positions[batch, index]
