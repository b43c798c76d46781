"""Base class of score biases that depend only on the rows and columns between two cells."""

import math
from dataclasses import replace
from typing import Any, Self

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from posenc.arguments import check_count, explain_misfits
from posenc.encodings.base.check_inputs import validated_bias_positions, whole_cells
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.distance_bias import BiasMatrix
from posenc.encodings.base.position_encoding import ModelShape, PositionEncoding, check_heads
from posenc.encodings.base.term import PairwiseBias, Tokens
from posenc.encodings.numerics.torch_modes import extremes_if_readable
from posenc.positions.tokens import has_no_place

QueryCells = Real[Tensor, "*#batch q_len 2"]
"""Rows and columns of queries, whole numbers or NaN: (q_len, 2) or (batch, q_len, 2)."""
KeyCells = Real[Tensor, "*#batch kv_len 2"]

NUM_CLASS_ROWS = 3
"""Rows of a table after those of the offsets: a class token sees a cell, a cell sees a class token,
a class token sees a class token."""


class CellBias(PositionEncoding):
    """Add a bias for each offset in rows and columns to the scores; a subclass defines `table`.

    score[h, i, j] += table[(dr + height - 1) * (2 width - 1) + dc + width - 1, h],
    (dr, dc) = cell_i - cell_j

    Args:
        num_heads: number of query heads.
        height, width: cells of the grid or window; rows and columns of two tokens differ by less.

    Raises: ValueError for a size below 1.
    """

    claims = Claims(places=(3,), source="see the subclass", num_axes=2, scope="layer")

    def __init__(self, num_heads: int, height: int, width: int) -> None:
        super().__init__()
        check_window(type(self).__name__, height, width)
        self.num_heads = num_heads
        self.height = height
        self.width = width
        self.claims = replace(self.claims, max_positions=min(height, width))

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> Self:
        """Build the encoding for a model. The grid defaults to the smallest square with at least
        train_length cells."""
        side = math.isqrt(shape.train_length - 1) + 1
        return super().from_shape(shape, **{"height": side, "width": side, **options})

    @property
    def num_offsets(self) -> int:
        """Return the number of offsets between two cells of the grid."""
        return (2 * self.height - 1) * (2 * self.width - 1)

    def table(self, dtype: torch.dtype) -> Float[Tensor, "{self.num_offsets}+3 {self.num_heads}"]:
        """Return the bias of each offset, row by row, then those of NUM_CLASS_ROWS pairs with a
        class token, in `dtype` or a wider one. A subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define table(dtype)")

    @explain_misfits
    def forward(self, q_positions: QueryCells, kv_positions: KeyCells) -> BiasMatrix:
        """Return the bias of each pair, (num_heads, q_len, kv_len), or (batch, num_heads, q_len,
        kv_len) if positions are batched."""
        checked = validated_bias_positions(
            type(self).__name__, q_positions, kv_positions, num_axes=2
        )
        return self._bias_of_pairs(*checked, self.table(torch.float32))

    def term(self, q: Tokens, k: Tokens) -> PairwiseBias:
        assert q.x is not None
        check_heads(self, self.num_heads, q.x)
        table = self.table(q.x.dtype)

        def by_pair(q: Tokens, k: Tokens) -> Tensor:
            return self._bias_of_pairs(q.positions, k.positions, table)

        return PairwiseBias(q, k, by_pair)

    def _bias_of_pairs(
        self, q_positions: QueryCells, kv_positions: KeyCells, table: Tensor
    ) -> BiasMatrix:
        """Return the bias of each pair, read from what `table` returned, without checking the
        shapes of positions."""
        rows = self._table_rows(q_positions, kv_positions)
        bias = table.T.contiguous().index_select(1, rows.flatten())
        bias = bias.view(self.num_heads, *rows.shape)
        return bias if rows.ndim == 2 else bias.movedim(0, 1)

    def _table_rows(
        self, q_positions: QueryCells, kv_positions: KeyCells
    ) -> Int[Tensor, "*batch q_len kv_len"]:
        """Return the row of the table for each pair. Raise ValueError for two cells whose rows or
        columns differ by height or width, or more; not checked if they are not on the CPU."""
        name = type(self).__name__
        q_cells = whole_cells(name, q_positions)
        kv_cells = whole_cells(name, kv_positions)
        offsets = q_cells[..., :, None, :] - kv_cells[..., None, :, :]
        if not (q_positions.is_floating_point() or kv_positions.is_floating_point()):
            return self._rows_of_offsets(offsets)
        # Only real numbers can be NaN, which marks class tokens.
        query_is_class = has_no_place(q_positions)[..., :, None]
        key_is_class = has_no_place(kv_positions)[..., None, :]
        is_class_pair = query_is_class | key_is_class
        rows = self._rows_of_offsets(offsets.masked_fill(is_class_pair[..., None], 0))
        which_class_row = torch.where(query_is_class, 2 * key_is_class.long(), 1)
        return torch.where(is_class_pair, self.num_offsets + which_class_row, rows)

    def _rows_of_offsets(self, offsets: Tensor) -> Tensor:
        """Return the row of the table for each offset, integers (..., 2)."""
        row_offset, column_offset = offsets.unbind(-1)
        self._check_reach("rows", row_offset, self.height)
        self._check_reach("columns", column_offset, self.width)
        first_row = row_offset + self.height - 1
        first_column = column_offset + self.width - 1
        return first_row * (2 * self.width - 1) + first_column

    def _check_reach(self, name: str, offset: Tensor, limit: int) -> None:
        """Raise ValueError for offsets of `limit` or more; `name` says what they count."""
        low, high = extremes_if_readable(offset) or (0, 0)
        if low <= -limit or high >= limit:
            raise ValueError(
                f"{type(self).__name__}: two tokens are {max(high, -low)} {name} apart, and a grid "
                f"of {self.height} x {self.width} has at most {limit - 1}. Build it for the whole "
                "grid, or give positions inside of a window."
            )


def check_window(caller: str, height: int, width: int) -> None:
    """Raise TypeError or ValueError unless both are whole numbers from 1 on."""
    check_count(caller, "height", height)
    check_count(caller, "width", width)
