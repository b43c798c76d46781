"""Attend with a bias by distance without materializing it for every pair.

For n queries and m keys at consecutive positions, a head's bias is one row of n + m - 1 numbers:

    row       b[4]  b[3]  b[2]  b[1]  b[0]  -inf  -inf      by falling distance
              \\________________/                            bias of the last query for 3 keys
                    \\________________/                      bias of the query before it
                          \\__________________/              ...

Each query reads a part of the row that begins one entry later than that of the next query. With the
queries in reverse order, entry (i, j) of the bias is row[offset + i + j]: a view of the row with
strides (1, 1), which takes no memory. torch's flash kernel reads it as its mask. So attention with
a bias by distance costs as much as attention without one, and less if the bias hides far keys, as
ALiBi's does. In the backward pass this holds if the bias is constant.

This file computes the row and plans blocks of queries ("strips"), each over the keys that the mask
shows to it. `strips_forward` runs them. `strips_backward` computes gradients, also of the row.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways import flash
from posenc.attend.ways.strips_backward import Strips
from posenc.attend.ways.strips_forward import Group, Plan, Strip, forward
from posenc.encodings.numbers.precision import at_least_float32
from posenc.encodings.numbers.tracking import readable

ROWS = 256
"""Queries per strip. Within a strip, pairs that a causal mask hides are computed too."""
TOGETHER = 1024
"""Queries that attend in one call to the keys visible to all of them: torch's kernel is up to a
fifth faster with 768 queries or more."""


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by strips of queries at consecutive positions, whose distance alone counts."""
    if problem.term is None and problem.causal_by_index and not problem.needs_grad:
        q, k, v = flash.same_width(problem.q, problem.k, problem.v)
        out, lse = flash.attend(q, k, v, None, problem.scale)
        return out[..., : problem.v.shape[-1]], lse
    row = falling_row(problem)
    hidden = _hidden(problem, row.detach())
    if any(hidden):
        first = torch.tensor(hidden, device=row.device)[:, None]
        row = row.masked_fill(torch.arange(row.shape[1], device=row.device) < first, -torch.inf)
    plan = _plan(problem, row, hidden)
    if not (problem.need_lse or problem.needs_grad):
        return forward(problem.q, problem.k, problem.v, row, problem.scale, plan)[0], None
    ends = _constant(problem), problem.q_len - problem.distances[0]
    out, lse = Strips.apply(problem.q, problem.k, problem.v, row, problem.scale, plan, ends)  # type: ignore[misc]
    blind = lse == -torch.inf  # nothing passes a gradient through these
    return out, lse.masked_fill(blind, -torch.inf) if problem.need_lse else None


def _plan(problem: Problem, row: Tensor, hidden: list[int]) -> Plan:
    """Divide heads by how many of the row's first entries are hidden, and queries into groups."""
    plan, head, heads, shared = [], 0, len(hidden), len(hidden) // problem.k.shape[1]
    together = shared * -(-torch.get_num_threads() // max(1, len(problem.q)))  # one a thread
    if not problem.needs_grad and problem.kv_len <= TOGETHER:
        together = heads  # more calls would cost more than they save
    calls = [hidden[i // together * together :][:together] for i in range(0, heads, shared)]
    for ends, same in itertools.groupby((min(each), max(each)) for each in calls):
        theirs = slice(head, head := head + len(list(same)))
        mine = slice(theirs.start * shared, head * shared)
        starts = range(0, problem.q_len, TOGETHER)
        groups = [_group(problem, row[mine], start, *ends) for start in starts]
        plan.append((mine, theirs, groups))
    return plan


def _hidden(problem: Problem, row: Tensor) -> list[int]:
    """Return for each head of q how many of the row's first entries do not matter."""
    q_len, kv_len, none = problem.q_len, problem.kv_len, [0] * len(row)
    # Tiny weights are slow in 32 bits; otherwise few keys are attended to faster.
    few = ROWS if problem.needs_grad or problem.q.dtype == row.dtype else TOGETHER
    if kv_len <= few or q_len > kv_len or not (len(problem.q) and readable(row)):
        return none
    # Every query has a key for each of these entries.
    below = row - row[:, q_len - 1 : kv_len].amax(-1, keepdim=True)
    if not bool((below.nan_to_num(neginf=0) < -87).any()):  # no weight is tiny
        return none
    return (below.cummax(-1).values < problem.negligible()[:, None]).sum(-1).tolist()


def _constant(problem: Problem) -> int:
    """Return how many of the row's first entries are one parameter of each head."""
    first = None if problem.term is None else problem.term.constant_from
    if first is None or problem.shift is None or problem.mask is None or not problem.mask.causal:
        return 0
    if problem.distances[1] + problem.shift < first:  # the mask hides all of them
        return 0
    return min(max(0, problem.q_len + problem.shift - first), problem.q_len + problem.kv_len - 1)


def _group(problem: Problem, row: Tensor, begin: int, hidden: int, most_hidden: int) -> Group:
    """Return the strips of TOGETHER queries from `begin` on, and the keys that all of them see. The
    first `hidden` entries of the row are hidden for all heads, `most_hidden` for some."""
    end, q_len = min(begin + TOGETHER, problem.q_len), problem.q_len
    size = ROWS if problem.mask is not None else TOGETHER
    strips = []
    for start in range(begin, end, size):
        stop = min(start + size, end)
        strip = Strip(start, stop, *problem.maybe_visible(start, stop))
        strips.append(strip.reading(q_len, hidden, row.shape[1]))
    first, last = problem.all_visible(begin, end)
    first = max(first, most_hidden - q_len + end)
    # One key less on both sides, so that each query sees at least one of the remaining keys.
    shared = Strip(begin, end, first + 1 if first else 0, last - 1)
    if len(strips) == 1 or shared.last - shared.first < ROWS:
        return Group(strips, None)
    read = row[:, q_len - end + first : q_len - begin + last - 1]
    return Group(strips, shared if readable(read) and bool(read.isfinite().all()) else None)


def falling_row(problem: Problem) -> Tensor:
    """Return the bias by falling distance, (num_heads, q_len + kv_len - 1), -inf where the mask
    hides it; its first entry is for the last query and the first key."""
    farthest, size = problem.q_len - 1, problem.q_len + problem.kv_len - 1
    least, most = problem.distances  # entries that the mask hides are not computed
    first = min(max(0, farthest - most), size)
    last = max(first, min(size, farthest - least + 1))
    if problem.term is None:
        dtype = at_least_float32(problem.q.dtype)
        row = problem.q.new_zeros(problem.q.shape[1], last - first, dtype=dtype)
    else:
        row = problem.by_distance(farthest - first, last - first)
    return F.pad(row, (first, size - last), value=-torch.inf)
