"""Use tensors in other shapes without copying them: heads that several query heads share, and
values by distance as values by pair of query and key."""

from collections.abc import Iterable

import torch
from torch import Tensor

from posenc.encodings.numerics.torch_modes import inside_python_export


def grouped_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for a (batch, heads, rows, inner) and b (batch, kv_heads, inner, columns), where
    consecutive heads of a share a head of b, which is not copied."""
    batch, num_heads, num_rows, inner_size = a.shape
    if num_heads == b.shape[1]:
        return a @ b
    if inside_python_export():  # where torch cannot prove that the reshape below fits any length
        return a @ repeat_kv_heads(b, num_heads)
    grouped_rows = a.reshape(batch, b.shape[1], num_heads // b.shape[1] * num_rows, inner_size)
    return (grouped_rows @ b).reshape(batch, num_heads, num_rows, b.shape[-1])


def repeat_kv_heads(t: Tensor, num_heads: int, dim: int = 1) -> Tensor:
    """Return t with each head of axis `dim` repeated for the consecutive query heads that share it.
    This axis then has num_heads entries, a multiple of its size before. If it has as many already,
    return t itself."""
    num_kv_heads = t.shape[dim]
    if num_kv_heads == num_heads:
        return t
    if inside_python_export():  # torch 2.11 exports a repeated head for some lengths only
        kv_head_of_head = torch.arange(num_heads, device=t.device) // (num_heads // num_kv_heads)
        return t.index_select(dim, kv_head_of_head)
    return t.repeat_interleave(num_heads // num_kv_heads, dim)


def skew(values_by_distance: Tensor, kv_len: int) -> Tensor:
    """View values by distance, (..., q_len, q_len + kv_len), as values by key, (..., q_len,
    kv_len). Columns of the argument are for falling distances: the first one for the last query and
    the first key; the last one is not used.

    Query i starts at column q_len - 1 - i, so each row is shifted by one column. For 3 queries and
    2 keys, with the columns that are returned marked:

        query 0    .  .  x  x  .
        query 1    .  x  x  .  .
        query 2    x  x  .  .  .

    In memory, where a row has `width` numbers, those of query i begin at i * width + q_len - 1 - i:
    at q_len - 1 for the first query, and width - 1 further for each next one. So from number q_len
    - 1 on, rows of width - 1 numbers begin with them.
    """
    q_len, width = values_by_distance.shape[-2:]
    flat_values = values_by_distance.flatten(-2).narrow(-1, q_len - 1, q_len * (width - 1))
    return flat_values.unflatten(-1, (q_len, width - 1)).narrow(-1, 0, kv_len)


ScoreColumns = tuple[int, int, Tensor]
"""Tuple (start, stop, values): numbers to add to the columns [start, stop) of the scores. `values`
is (..., rows, stop - start), where axes may be 1."""


def add_columns(
    scores: Tensor, *tiles: Iterable[ScoreColumns], rows_per_tile: int | None = None
) -> Tensor:
    """Add numbers, given for some columns at a time, to the scores (..., q_len, kv_len) in place,
    and return the scores.

    tiles: one for each block of `rows_per_tile` consecutive rows of scores. A tile is an iterable
        of ScoreColumns in any order, which together must have each column once: with gradients
        enabled anything else raises RuntimeError.
    rows_per_tile: the last tile may have fewer. None: one tile has all rows.
    """
    blocks = scores.split(rows_per_tile or scores.shape[-2], -2)
    if not torch.is_grad_enabled():
        for block, parts in zip(blocks, tiles, strict=True):
            for start, stop, part in parts:
                block[..., start:stop].add_(part)
        return scores
    # One addition: the gradient of an addition to a slice would copy all scores.
    added_blocks = [
        _concatenate_columns(parts, block) for parts, block in zip(tiles, blocks, strict=True)
    ]
    return scores.add_(added_blocks[0] if len(added_blocks) == 1 else torch.cat(added_blocks, -2))


def _concatenate_columns(parts: Iterable[ScoreColumns], like: Tensor) -> Tensor:
    """Concatenate `parts`, which together have all columns of `like`, in the order of their
    columns, into a tensor of its shape."""
    sorted_parts = sorted(parts, key=lambda part: part[0])
    return torch.cat(
        [t.expand(*like.shape[:-1], stop - start) for start, stop, t in sorted_parts], -1
    )
