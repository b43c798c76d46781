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

In this folder `row` is such a row, a bias by falling distance. A row of scores, or of a block, is
that of one query, as in `num_rows` and STRIP_ROWS. A row of the batch is one of its sequences.

This file computes the row and plans blocks of queries ("strips"), each over the keys that the mask
shows to it. `strips_forward` runs them. `strips_backward` computes gradients, also of the row.
"""

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways import flash
from posenc.attend.ways.strips_backward import RowEntries, StripsAttention
from posenc.attend.ways.strips_forward import HeadPlan, Strip, StripGroup, StripPlan, forward
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.torch_modes import is_readable

STRIP_ROWS = 256
"""Number of queries per strip. Within a strip, pairs that a causal mask hides are computed too."""
GROUP_ROWS = 1024
"""Number of queries that attend in one call to the keys visible to all of them: torch's kernel is
up to a fifth faster with 768 queries or more."""


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend by strips of queries at consecutive positions, with a bias that depends on the
    distance only, or none. Return the output (batch, num_heads, q_len, v_dim), and the log-sum-exp
    (batch, num_heads, q_len), which may be None if it is not needed."""
    if problem.term is None and problem.is_causal_by_index and not problem.needs_grad:
        # Only a log-sum-exp is missing from the form "plain". The operator below returns it, and is
        # causal by itself: it needs no row of bias. It has no backward pass here.
        q, k, v = flash.pad_to_same_width(problem.q, problem.k, problem.v)
        out, lse = flash.attend(q, k, v, None, problem.scale)
        return out[..., : problem.v.shape[-1]], lse

    row = bias_by_falling_distance(problem)
    num_negligible = _count_negligible_entries(problem, row.detach())
    if any(num_negligible):
        first_kept = torch.tensor(num_negligible, device=row.device)[:, None]
        index = torch.arange(row.shape[1], device=row.device)
        row = row.masked_fill(index < first_kept, -torch.inf)
    plan = _plan_heads(problem, row, num_negligible)
    if not (problem.needs_lse or problem.needs_grad):
        out, _ = forward(problem.q, problem.k, problem.v, row, problem.scale, plan)
        return out, None

    least_distance, _ = problem.visible_distances
    entries = RowEntries(
        _count_constant_entries(problem), visible_end=problem.q_len - least_distance
    )
    out, lse = StripsAttention.apply(  # type: ignore[misc]
        problem.q, problem.k, problem.v, row, problem.scale, plan, entries
    )
    if not problem.needs_lse:
        return out, None
    sees_no_key = lse == -torch.inf
    # lse is -inf there already. Filling it again stops the gradient of lse for these queries, which
    # the backward pass would take for the gradient of a sum over keys.
    return out, lse.masked_fill(sees_no_key, -torch.inf)


def _plan_heads(problem: Problem, row: Tensor, num_negligible: list[int]) -> StripPlan:
    """Divide the queries of each head into groups of strips, and the heads into those that attend
    together: blocks of `_heads_per_call` heads. Blocks next to each other are joined if their heads
    leave out the same fewest and the same most far keys.

    row: the bias by falling distance, (num_heads, q_len + kv_len - 1).
    num_negligible: for each head, how many of the first entries of `row` may be left out.
    """
    num_heads = len(num_negligible)
    query_heads_per_key_head = num_heads // problem.k.shape[1]
    heads_per_call = _heads_per_call(problem, num_heads, query_heads_per_key_head)
    # For each head of keys: the fewest and the most entries that a head of its call leaves out.
    left_out_by_kv_head = []
    for head in range(0, num_heads, query_heads_per_key_head):
        first_head_of_call = head // heads_per_call * heads_per_call
        counts_of_call = num_negligible[first_head_of_call : first_head_of_call + heads_per_call]
        left_out_by_kv_head.append((min(counts_of_call), max(counts_of_call)))

    plan = []
    kv_head = 0
    for (fewest_left_out, most_left_out), kv_heads_alike in itertools.groupby(left_out_by_kv_head):
        kv_head_slice = slice(kv_head, kv_head + len(list(kv_heads_alike)))
        kv_head = kv_head_slice.stop
        q_head_slice = slice(
            kv_head_slice.start * query_heads_per_key_head,
            kv_head_slice.stop * query_heads_per_key_head,
        )
        groups = [
            _plan_group(problem, row[q_head_slice], begin, fewest_left_out, most_left_out)
            for begin in range(0, problem.q_len, GROUP_ROWS)
        ]
        plan.append(HeadPlan(q_head_slice, kv_head_slice, groups))
    return plan


def _heads_per_call(problem: Problem, num_heads: int, query_heads_per_key_head: int) -> int:
    """Return how many query heads attend in one call of the kernel, a multiple of
    `query_heads_per_key_head`: the number of query heads that share a head of keys."""
    if not problem.needs_grad and problem.kv_len <= GROUP_ROWS:
        return num_heads  # more calls would cost more than they save
    num_batch_rows = max(1, len(problem.q))
    # A head of keys for each thread.
    kv_heads_per_call = -(-torch.get_num_threads() // num_batch_rows)
    return query_heads_per_key_head * kv_heads_per_call


def _count_negligible_entries(problem: Problem, row: Tensor) -> list[int]:
    """Return for each query head how many of the first entries of `row`, those of the farthest
    keys, do not matter, because their keys get no weight next to nearer ones. Return zeros where
    leaving them out would save nothing.

    row: the bias by falling distance, (num_heads, q_len + kv_len - 1), without a gradient.
    """
    q_len = problem.q_len
    kv_len = problem.kv_len
    zero_counts = [0] * len(row)
    # The backward pass computes in the dtype of the row, float32 or wider; the forward pass in that
    # of q. In 32 bits tiny weights are slow, so that dropping keys pays from fewer keys on.
    computes_wide = problem.needs_grad or problem.q.dtype == row.dtype
    fewest_keys = STRIP_ROWS if computes_wide else GROUP_ROWS
    if kv_len <= fewest_keys or q_len > kv_len:
        return zero_counts
    if not len(problem.q) or not is_readable(row):
        return zero_counts
    # Every query has a key for each of the entries q_len - 1 to kv_len - 1. The highest of these is
    # a bias that each query sees at some key.
    highest_bias = row[:, q_len - 1 : kv_len].amax(-1, keepdim=True)
    differences = row - highest_bias
    # exp(-87) is about the least normal number of float32. Hidden keys (-inf) cost no time.
    has_tiny_weights = (differences.nan_to_num(neginf=0) < -87).any()
    if not bool(has_tiny_weights):
        return zero_counts
    # An entry is dropped if it and all before it are negligible.
    is_dropped = differences.cummax(-1).values < problem.negligible_threshold()[:, None]
    return is_dropped.sum(-1).tolist()


def _count_constant_entries(problem: Problem) -> int:
    """Return how many of the first entries of the bias by falling distance, those of the farthest
    keys, are one parameter of each head, as in T5's last bucket."""
    constant_from = None if problem.term is None else problem.term.constant_from
    is_causal = problem.mask is not None and problem.mask.causal
    if constant_from is None or problem.query_offset is None or not is_causal:
        return 0
    _, greatest_distance = problem.visible_distances
    if greatest_distance + problem.query_offset < constant_from:  # the mask hides all of them
        return 0
    # Entry 0 is for distance q_len - 1 + query_offset, each further one for a distance less by 1.
    num_constant = max(0, problem.q_len + problem.query_offset - constant_from)
    return min(num_constant, problem.q_len + problem.kv_len - 1)


def _plan_group(
    problem: Problem, row: Tensor, begin: int, fewest_left_out: int, most_left_out: int
) -> StripGroup:
    """Return the strips of GROUP_ROWS queries from `begin` on, and the keys that all of these
    queries see.

    row: the bias by falling distance of the heads that attend together, (heads, q_len + kv_len -
        1).
    fewest_left_out, most_left_out: how many of its first entries all of these heads leave out, and
        how many at least one of them does.
    """
    q_len = problem.q_len
    end = min(begin + GROUP_ROWS, q_len)
    strip_rows = STRIP_ROWS if problem.mask is not None else GROUP_ROWS
    strips = []
    for start in range(begin, end, strip_rows):
        stop = min(start + strip_rows, end)
        strip = Strip(start, stop, *problem.keys_maybe_visible(start, stop))
        strips.append(strip.restrict_to_entries(q_len, fewest_left_out, row.shape[1]))

    kv_start, kv_stop = problem.keys_visible_to_all(begin, end)
    kv_start = max(kv_start, most_left_out - q_len + end)
    # One key less on both sides, so that each query sees at least one of the remaining keys: the
    # result for these keys, to which the shared one is joined, then has a finite log-sum-exp.
    shared = Strip(begin, end, kv_start + 1 if kv_start else 0, kv_stop - 1)
    if len(strips) == 1 or shared.kv_stop - shared.kv_start < STRIP_ROWS:
        return StripGroup(strips, None)
    # The bias may hide keys, too: it must show the shared keys and those left out on both sides.
    read_entries = row[:, q_len - end + kv_start : q_len - begin + kv_stop - 1]
    all_are_finite = is_readable(read_entries) and bool(read_entries.isfinite().all())
    return StripGroup(strips, shared if all_are_finite else None)


def bias_by_falling_distance(problem: Problem) -> Tensor:
    """Return the bias by falling distance, (num_heads, q_len + kv_len - 1), -inf where the mask
    hides it; its first entry is for the last query and the first key."""
    farthest = problem.q_len - 1
    num_entries = problem.q_len + problem.kv_len - 1
    # Entry e is for distance farthest - e. Entries that the mask hides are not computed.
    least_distance, greatest_distance = problem.visible_distances
    visible_start = min(max(0, farthest - greatest_distance), num_entries)
    visible_stop = max(visible_start, min(num_entries, farthest - least_distance + 1))
    if problem.term is None:
        dtype = at_least_float32(problem.q.dtype)
        row = problem.q.new_zeros(problem.q.shape[1], visible_stop - visible_start, dtype=dtype)
    else:
        row = problem.bias_of_distances(farthest - visible_start, visible_stop - visible_start)
    return F.pad(row, (visible_start, num_entries - visible_stop), value=-torch.inf)
