"""Products with vectors that belong to the distance, added to scores by C where there is a
compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.numbers import native
from posenc.numbers.tracking import watched

SOURCE = Path(__file__).with_name("products.c")
FUNCTIONS = ("add_of_queries", "add_of_keys")
WIDTH = 1024
"""The widest vectors whose copies the stack holds."""


def applies(scores: Tensor, vectors: Tensor, table: Tensor) -> bool:
    """Whether C can add to these scores: float32 on the CPU, in one piece, and nobody watches;
    table (num_heads or 1, distances, width) with the distances side by side."""
    given = scores, vectors, table
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in given)
    fits = scores.is_contiguous() and table.stride(-2) == 1 and vectors.shape[-1] <= WIDTH
    return plain and fits and not watched() and _library() is not None


def add(scores: Tensor, first: int, last: int, vectors: Tensor, table: Tensor, of: str) -> None:
    """Add to columns first .. last of scores (batch, num_heads, rows, keys), in place.

    of "queries": scores[i, first + j] += vectors[i] . table[:, rows - 1 - i + j]
    of "keys": scores[i, first + j] += vectors[j] . table[:, last - first - 1 - j + i]

    vectors (batch, num_heads, rows or last - first, width); table (num_heads or 1, width,
    distances), its distances side by side, is a part of a wider one.
    """
    batch, heads, rows, keys = scores.shape
    (vectors, between), count = _by_head(vectors), last - first
    needed = rows + count - 1
    if table.shape[-1] < needed or table.stride(-1) != 1:
        raise ValueError(f"the table needs {needed} distances side by side: {table.shape}")
    function = getattr(_library(), f"add_of_{of}")
    start = scores.data_ptr() + first * scores.element_size()
    # The stride of an axis of one says nothing.
    apart = table.stride(1) if table.shape[1] > 1 else table.stride(0)
    native.run(
        function, batch * heads, start, rows, count, keys, vectors, between, vectors.shape[-1],
        table, apart, len(table),
    )  # fmt: skip


def _by_head(vectors: Tensor) -> tuple[Tensor, int]:
    """The vectors, copied where those of a head do not follow each other, or heads lie at several
    distances from each other; and that distance."""
    batch, heads, count, width = vectors.shape
    steps = vectors.stride()
    follow = steps[-1] == 1 and steps[-2] == width
    if follow and (batch == 1 or heads == 1 or steps[0] == heads * steps[1]):
        return vectors, steps[1] if heads > 1 else steps[0]
    return native.in_one_piece(vectors), count * width


def _library() -> Any:
    return native.load(SOURCE, FUNCTIONS)
