"""Attend with a bias by distance without materializing it for every pair.

For n queries and m keys at consecutive positions, a head's bias is one row of n + m - 1 numbers:

    row       b[4]  b[3]  b[2]  b[1]  b[0]  -inf  -inf      by falling distance
              \\________________/                            bias of the last query for 3 keys
                    \\________________/                      bias of the query before it
                          \\__________________/              ...

Each query reads a part of the row that begins one entry later than that of the next query. With the
queries in reverse order, entry (i, j) of the bias is row[offset + i + j]: a view of the row with
strides (1, 1), which takes no memory. torch's flash kernel reads it as its mask. So attention with
a bias by distance costs as much as attention without one. In the backward pass this holds if the
bias is constant.

This file computes the row. `strips_forward` runs blocks of queries ("strips"), each over the keys
that the mask shows to it. `strips_backward` computes gradients, also of the row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways.strips_backward import Strips
from posenc.attend.ways.strips_forward import Group, Strip, forward
from posenc.encodings.base.base import check_heads
from posenc.encodings.numbers.precision import at_least_float32

ROWS = 256
"""Queries per strip. Within a strip, pairs that a causal mask hides are computed too."""
TOGETHER = 1024
"""Queries that attend in one call to the keys visible to all of them: torch's kernel is up to a
fifth faster with 768 queries or more."""


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by strips. choose.py has checked that bias and mask depend only on the distance, and
    that positions are consecutive."""
    row = falling_row(problem)
    groups = [_group(problem, row, start) for start in range(0, problem.q_len, TOGETHER)]
    if not (problem.need_lse or problem.known.needs_grad):
        return forward(problem.q, problem.k, problem.v, row, problem.scale, groups)[0], None
    out, lse = Strips.apply(problem.q, problem.k, problem.v, row, problem.scale, groups)  # type: ignore[misc]
    blind = ~_sees_a_key(problem)  # torch gives 0 there
    return out, lse.masked_fill(blind, -torch.inf) if problem.need_lse else None


def _group(problem: Problem, row: Tensor, begin: int) -> Group:
    """Return the strips of TOGETHER queries from `begin` on, and the keys that all of them see."""
    end = min(begin + TOGETHER, problem.q_len)
    size = ROWS if problem.mask is not None else TOGETHER
    strips = []
    for start in range(begin, end, size):
        stop = min(start + size, end)
        strips.append(Strip(start, stop, *problem.maybe_visible(start, stop)))
    first, last = problem.all_visible(begin, end)
    # One key less on both sides, so that each query sees at least one of the remaining keys.
    shared = Strip(begin, end, first + 1 if first else 0, last - 1)
    if len(strips) == 1 or shared.last - shared.first < ROWS:
        return Group(strips, None)
    read = row[:, problem.q_len - end + shared.first : problem.q_len - begin + shared.last - 1]
    return Group(strips, shared if bool(read.isfinite().all()) else None)


def falling_row(problem: Problem) -> Tensor:
    """Return the bias by falling distance, (num_heads, q_len + kv_len - 1), -inf where the mask
    hides it; its first entry is for the last query and the first key."""
    size = problem.q_len + problem.kv_len - 1
    first, last = _visible(problem)  # entries that the mask hides are not computed
    if problem.term is None:
        dtype = at_least_float32(problem.q.dtype)
        row = problem.q.new_zeros(problem.q.shape[1], last - first, dtype=dtype)
    else:
        assert problem.term.by_distance is not None and problem.known.runs is not None
        q_start, k_start = problem.known.runs
        farthest = q_start + problem.q_len - 1 - k_start
        row = problem.term.by_distance(farthest - first, last - first, problem.q)
        check_heads(problem.encoding, row.shape[0], problem.q)
    return F.pad(row, (first, size - last), value=-torch.inf)


def _visible(problem: Problem) -> tuple[int, int]:
    """Return the range [first, last) of entries of `falling_row` that the mask does not hide."""
    mask, runs = problem.mask, problem.known.mask_runs
    size = problem.q_len + problem.kv_len - 1
    first, last = 0, size
    if mask is not None and runs is not None:
        itself = runs[0] + problem.q_len - 1 - runs[1]  # the entry of distance 0
        if mask.window is not None:
            first, last = max(first, itself - mask.window + 1), min(last, itself + mask.window)
        if mask.causal:
            last = min(last, itself + 1)
    first = min(first, size)
    return first, max(first, last)


def _sees_a_key(problem: Problem) -> Tensor:
    """Return booleans (q_len), True for queries that see at least one key."""
    first, last = _visible(problem)
    own = torch.arange(problem.q_len - 1, -1, -1, device=problem.q.device)  # where a row begins
    return (own < last) & (own + problem.kv_len > first) & (first < last)
