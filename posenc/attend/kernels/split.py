"""A bias that is a term of the query minus a term of the key, in extra columns of q and k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posenc.attend.problem import Problem
from posenc.numbers.heads import for_every_head

ROWS, STEEP_ROWS = 512, 128
"""Queries that share a row of key terms, which count from its middle: fewer where the terms fall by
more than 64 on the way, as large numbers are coarse and small weights slow."""


def refuse(problem: Problem) -> str | None:
    if torch.compiler.is_compiling():
        return "how many queries share a row of key terms depends on the numbers"
    if problem.mask is None or not problem.mask.causal:
        return "a term per key is the bias under a causal mask only"
    term = problem.term
    if term is None or term.split is None or term.combine is not None:
        return "it is no term of the query minus a term of the key"
    return None


def terms(problem: Problem) -> tuple[Tensor, Tensor]:
    """The terms of the queries and of the keys, each (batch or 1, num_heads, len)."""
    assert problem.term is not None and problem.term.split is not None
    row, key = problem.term.split()
    return row if row.ndim == 3 else row[None], key if key.ndim == 3 else key[None]


def block_rows(key: Tensor) -> int:
    """Queries that share a row of key terms (batch or 1, num_heads, kv_len). On CUDA looking would
    cost a synchronisation, so that the smaller number is taken."""
    if key.device.type != "cpu" or not key.numel():
        return STEEP_ROWS
    key = key.detach()
    fall = float((key.amax(-1) - key.amin(-1)).amax()) / key.shape[-1]
    return ROWS if fall * ROWS <= 64 else STEEP_ROWS


def run_folded(problem: Problem, kernel: Callable[[Problem, int, int], Tensor]) -> Tensor:
    """The same attention without the term: k carries it in columns of its own, against columns of
    ones in q; the query's term cancels in the softmax.

    Block by block of queries, each with terms that count from its middle: the numbers that matter
    to a block are then small, and no coarser at key 100,000 than at key 100.
    """
    row, key = terms(problem)
    rows = block_rows(key)
    outs = []
    for start in range(0, problem.q_len, rows):
        stop = min(start + rows, problem.q_len)
        block = problem.among(*problem.reach(start, stop))
        span = slice(block.first_key, block.first_key + block.kv_len)
        column = (row[..., (start + stop) // 2, None] - key[..., span]) / problem.scale
        recompute = problem.needs_grad and problem.q_len > rows
        if recompute:  # else the backward pass would keep a copy of k for each block
            outs.append(
                checkpoint(
                    _attend, block, column, start, stop, kernel, use_reentrant=False,
                    preserve_rng_state=False, determinism_check="none",
                )
            )  # fmt: skip
        else:
            outs.append(_attend(block, column, start, stop, kernel))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def _attend(
    block: Problem,
    column: Tensor,
    start: int,
    stop: int,
    kernel: Callable[[Problem, int, int], Tensor],
) -> Tensor:
    batch, heads, q_len, width = block.q.shape
    dtype = block.product_dtype
    # What is far enough to overflow has no weight, or is hidden.
    most = torch.finfo(dtype).max / 4
    column = column.clamp(-most, most)
    high = column.to(dtype)
    # Half types take two columns: one would round the terms to whole numbers at a few hundred.
    parts = [high, (column - high.to(column.dtype)).to(dtype)] if dtype.itemsize == 2 else [high]
    columns = torch.stack(parts, -1).expand(batch, heads, -1, -1)
    room = -(width + len(parts)) % 8  # kernels like widths that are a multiple of 8
    ones = block.q.new_ones(batch, heads, q_len, len(parts))
    folded = replace(
        block,
        q=F.pad(torch.cat([block.q, ones], -1), (0, room)),
        k=F.pad(torch.cat([for_every_head(block.k, heads), columns], -1), (0, room)),
        v=for_every_head(block.v, heads),
        term=None,
    )
    return kernel(folded, start, stop)
