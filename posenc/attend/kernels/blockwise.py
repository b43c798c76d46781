"""Query blocks, each with a plain softmax, recomputed in the backward pass: any encoding in memory
that grows only with the length."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attend.kernels import fused_blocks, reference
from posenc.attend.kernels.cost import Cost, dense_bytes
from posenc.attend.problem import Problem
from posenc.numbers.precision import at_least_float32
from posenc.numbers.tracking import transformed

BLOCK_BYTES, MOST_BYTES = 2 * 2**20, 8 * 2**20
"""What one block of scores takes where it has at least `ROWS` queries, and where it has fewer.
Larger blocks leave the cache, smaller ones pay more for their overhead."""
ROWS = 64


def refuse(problem: Problem) -> str | None:
    return "torch.func's transforms do not go with recomputation" if transformed() else None


def cost(problem: Problem) -> Cost:
    return Cost("O(q_len * kv_len)", dense_bytes(problem, min(problem.q_len, block_rows(problem))))


def block_rows(problem: Problem) -> int:
    """Queries per block: a power of two from 16 to 512 that keeps the scores in the cache, or has
    enough of them for a product."""
    batch, heads = problem.q.shape[:2]
    row_bytes = batch * heads * problem.kv_len * max(4, problem.q.element_size())
    fit, most = (size // max(row_bytes, 1) for size in (BLOCK_BYTES, MOST_BYTES))
    rows = max(1, fit, min(max(ROWS, fused_blocks.block_rows(problem)), most))
    return min(512, max(16, 1 << (rows.bit_length() - 1)))


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    rows = block_rows(problem)
    blocks = [(start, min(start + rows, problem.q_len)) for start in range(0, problem.q_len, rows)]
    problem = problem.ready(rows)
    if torch.compiler.is_compiling():
        return _join([reference.attend(problem.among(*problem.reach(*b)), *b) for b in blocks])
    if fused_blocks.applies(problem):
        return fused_blocks.run(problem, blocks)
    if not problem.needs_grad and not problem.autocast:
        return _in_place(problem, blocks)
    attend = _recomputed if problem.needs_grad else reference.attend
    return _join([attend(problem.among(*problem.reach(*b)), *b) for b in blocks])


def _recomputed(problem: Problem, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    return checkpoint(  # type: ignore[return-value]
        reference.attend,
        problem,
        start,
        stop,
        use_reentrant=False,
        preserve_rng_state=problem.dropout_p > 0,
        determinism_check="none",
    )


def _join(results: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([out for out, _ in results], dim=2), torch.cat(lses, dim=2) if lses else None


def _in_place(problem: Problem, blocks: list[tuple[int, int]]) -> tuple[Tensor, Tensor | None]:
    """The same in one buffer for all blocks' scores and weights: fresh memory costs more than what
    is done with it."""
    batch, heads, q_len = problem.q.shape[:3]
    dtype = at_least_float32(problem.q.dtype)
    problem = replace(
        problem, k=problem.k.to(dtype).contiguous(), v=problem.v.to(dtype).contiguous()
    )
    buffer = problem.q.new_zeros(batch * heads * blocks[0][1] * problem.kv_len, dtype=dtype)
    out = problem.q.new_empty(batch, q_len, heads, problem.v.shape[-1]).transpose(1, 2)
    lse = problem.q.new_empty(batch, heads, q_len, dtype=dtype) if problem.need_lse else None
    reads_mask = problem.term is not None and problem.term.reads_mask
    for start, stop in blocks:
        first, last = problem.reach(start, stop)
        part = problem.among(first, last)
        size = batch * heads * (stop - start) * (last - first)
        scores = buffer[:size].view(batch, heads, stop - start, last - first)
        seen = part.visible(start, stop) if reads_mask else None
        scores = part.scores(start, stop, seen, out=scores)
        part.hide(scores, start, stop, torch.finfo(scores.dtype).min)
        if lse is not None:
            lse[:, :, start:stop] = scores.logsumexp(-1)
        weights = torch.softmax(scores, -1, out=scores)
        visible = None if problem.every_row_sees_a_key else part.visible(start, stop)
        if visible is not None:
            weights.masked_fill_(~visible, 0)
            if lse is not None:
                lse[:, :, start:stop].masked_fill_(~visible.any(-1), -torch.inf)
        if problem.dropout_p:
            torch.nn.functional.dropout(weights, problem.dropout_p, inplace=True)
        out[:, :, start:stop] = part.combine(weights, start, stop)
    return out, lse
