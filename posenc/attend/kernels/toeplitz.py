"""A bias that depends only on the distance, through a view of one row per head: torch's CPU flash
kernel in query blocks that skip what the mask hides, and the bias's own gradient without n x n."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.attend.kernels.cost import largest_norms, negligible
from posenc.attend.kernels.toeplitz_forward import forward
from posenc.attend.kernels.toeplitz_gradients import (
    Block,
    differentiable_gradients,
    kernel_gradients,
    rows_in_memory,
    table_gradients,
)
from posenc.attend.problem import Problem
from posenc.encoding.base import check_heads
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.terms.term import Term

ROWS = 256
"""Queries per block: what a causal mask hides of a block is computed all the same."""


FEW = 256
"""Up to this many queries nothing is cut: looking for it costs more than what it saves."""


SAMPLED = 64
"""Look at every 64th row of q and k first; usually that already rules out cutting."""


WORTH = 8
"""Cut only if at least 1/8 of a head's distances go: after a cut only heads of one reach can attend
together."""


def refuse(problem: Problem) -> str | None:
    """Why the Toeplitz path cannot run this call, or None."""
    if problem.q.device.type != "cpu":
        return "CUDA's kernels would write the view out"
    if problem.term is not None and not is_distance_bias(problem.term):
        return "it changes scores or values, which these kernels do not show"
    if problem.mask is not None and not problem.mask.exact:
        return "the mask is more than causality and a window"
    if problem.mask is not None and problem.mask_runs is None:
        return "the positions are not known to be consecutive"
    if problem.term is not None and distance_run(problem) is None:
        return "the positions are not known to be consecutive"
    return None


def is_distance_bias(term: Term) -> bool:
    """Whether the term is a function of the distance, and all that happens to scores and values."""
    return term.by_distance is not None and term.combine is None


def distance_run(problem: Problem) -> int | None:
    """The distance from the last query to the first key, where both are runs."""
    return None if problem.runs is None else problem.runs[0] + problem.q_len - 1 - problem.runs[1]


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    table = falling_bias(problem)
    blocks = []
    for start in range(0, problem.q_len, ROWS):
        stop = min(start + ROWS, problem.q_len)
        blocks.append((start, stop, *problem.reach(start, stop)))
    if not (problem.need_lse or problem.needs_grad):
        return forward(problem.q, problem.k, problem.v, table, problem.scale, blocks)[0], None
    out, lse = _Attention.apply(problem.q, problem.k, problem.v, table, problem.scale, blocks)  # type: ignore[misc]
    visible = _visible(problem, table.shape[1]) if problem.need_lse else None
    if visible is not None and not problem.every_row_sees_a_key:
        count = torch.nn.functional.pad(visible.cumsum(0), (1, 0))
        sees = (count[problem.kv_len :] > count[: problem.q_len]).flip(0)
        lse = lse.masked_fill(~sees, -torch.inf)  # the kernel gives 0
    return out, lse if problem.need_lse else None


def falling_bias(problem: Problem) -> Tensor:
    """The bias by falling distance, (num_heads, q_len + kv_len - 1), -inf where the mask hides it;
    entry m serves the m-th pair counted from the last query and the first key."""
    size = problem.q_len + problem.kv_len - 1
    runs = problem.mask_runs
    nearest = -size if runs is None else runs[0] + problem.q_len - 1 - runs[1]
    mask = problem.mask
    causal = mask is not None and mask.causal and runs is not None
    # What is after the query is hidden by the mask, and not computed.
    computed = min(size, max(nearest + 1, 1)) if causal else size
    dtype = at_least_float32(problem.q.dtype)
    if problem.term is not None:
        assert problem.term is not None and problem.term.by_distance is not None
        farthest = distance_run(problem)
        assert farthest is not None
        table = problem.term.by_distance(farthest, computed, problem.q)
        check_heads(problem.encoding, table.shape[0], problem.q)
        table = _without_negligible(problem, table, farthest)
    else:
        table = torch.zeros(problem.q.shape[1], computed, dtype=dtype)
    table = torch.nn.functional.pad(table, (0, size - computed), value=-torch.inf)
    if mask is not None and causal and mask.window is None and nearest >= 0:
        return table  # nothing else is hidden
    visible = _visible(problem, size)
    return table if visible is None else table.masked_fill(~visible, -torch.inf)


def _visible(problem: Problem, size: int) -> Tensor | None:
    """Which entries of the table the mask shows; None for all of them."""
    runs = problem.mask_runs
    if problem.mask is None or runs is None:
        return None
    distance = runs[0] + problem.q_len - 1 - runs[1] - torch.arange(size)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if problem.mask.causal:
        visible &= distance >= 0
    if problem.mask.window is not None:
        visible &= distance.abs() < problem.mask.window
    return visible


def _without_negligible(problem: Problem, table: Tensor, farthest: int) -> Tensor:
    """The table with -inf where no weight can reach what the dtype resolves, by far.

    The kernel's running softmax would spend its time on denormals there. No score is further from
    zero than the norms of q and k allow, and every row sees its own position.
    """
    own_first = farthest - problem.q_len + 1  # the first query's own key
    certain = problem.q_len > FEW and (problem.mask is None or problem.mask.exact)
    if not (certain and own_first >= 0 and farthest < min(problem.kv_len, table.shape[1])):
        return table
    numbers = table.detach().numpy()  # small: torch's own overhead is most of what this costs
    lowest, own = numbers.min(-1), numbers[:, farthest] + negligible(table.dtype)
    if (lowest >= own).all():  # whatever the scores are
        return table
    with torch.no_grad():
        for step in (SAMPLED, 1):
            norms = [largest_norms(t[:, :, ::step], table.dtype) for t in (problem.q, problem.k)]
            least = own - float(2 * abs(problem.scale) * norms[0].amax() * norms[1].amax())
            if (lowest >= least).all():
                return table
        hidden = table < torch.from_numpy(least)[:, None]
        if WORTH * hidden.sum(-1).amax() < table.shape[1]:
            return table
    return table.masked_fill(hidden, -torch.inf)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, blocks: list[Block]
    ) -> tuple[Tensor, Tensor]:
        lse = table.new_empty(q.shape[:3])
        out, *_ = forward(q, k, v, table, scale, blocks, lse)
        ctx.save_for_backward(q, k, v, table, out, lse)
        ctx.scale, ctx.blocks = scale, blocks
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_out, grad_lse = grads
        q, k, v, table, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is asked for
            return *differentiable_gradients(q, k, v, table, ctx.scale, grads), None, None
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        q, k, v, table = (rows_in_memory(t) for t in (q, k, v, table))
        plain = not ctx.needs_input_grad[3] and grad_lse is None and q.shape[-1] == v.shape[-1]
        if plain and q.shape[1] == k.shape[1]:
            return *kernel_gradients(q, k, v, table, out, lse, grad_out, ctx), None, None, None
        with without_autocast(q.device):  # of whoever goes back within it
            d_q, d_k, d_v, d_table = table_gradients(q, k, v, table, grad_out, grad_lse, ctx)
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_table, None, None
