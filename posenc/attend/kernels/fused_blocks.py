"""Query blocks whose term is written out and handed to a fused kernel as a mask."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.kernels import by_head
from posenc.attend.kernels.toeplitz_gradients import rows_in_memory
from posenc.attend.problem import Problem
from posenc.numbers import native
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.numbers.tracking import followed


def applies(problem: Problem) -> bool:
    """Whether the term, which is ready, is numbers that are added, nobody differentiates, and the
    kernel is the one for the CPU; values by distance are added to its results."""
    term = problem.term
    return suits(problem) and term is not None and (term.combine is None or term.gather is not None)


def suits(problem: Problem) -> bool:
    """The same, as far as it can be told before the term is ready."""
    if not is_additive(problem):
        return False
    assert problem.term is not None
    fits = problem.q.dtype != torch.float64 and problem.v.shape[-1] == problem.q.shape[-1]
    return problem.term.combine is None or (fits and problem.sees_no_later_position)


def is_additive(problem: Problem) -> bool:
    """The same of the scores alone."""
    term = problem.term
    if term is None or not term.additive or problem.dropout_p:
        return False
    followed = problem.needs_grad or torch.compiler.is_compiling()
    return problem.q.device.type == "cpu" and not followed


def block_rows(problem: Problem) -> int:
    """The least queries that the kernel takes at a time without being slower for it."""
    return problem.kv_len // 8 if is_additive(problem) else 0


def run(problem: Problem, blocks: list[tuple[int, int]]) -> tuple[Tensor, Tensor | None]:
    """The blocks' results and, where the call needs it, their log-sum-exp; one buffer holds the
    numbers of a block, for all blocks in turn. Autocast rounds what is multiplied, not these."""
    q, k, v = (t.to(problem.product_dtype) for t in (problem.q, problem.k, problem.v))
    with without_autocast(q.device):
        return _run(replace(problem, q=q, k=k, v=v), blocks)


def _run(problem: Problem, blocks: list[tuple[int, int]]) -> tuple[Tensor, Tensor | None]:
    batch, heads, q_len, width = problem.q.shape
    v_dim, dtype = problem.v.shape[-1], at_least_float32(problem.q.dtype)
    q, k, v = (rows_in_memory(t) for t in (problem.q, problem.k, problem.v))
    if v_dim != width:  # the kernel wants one width
        v = F.pad(v, (0, max(0, width - v_dim)))
        q, k = (F.pad(t, (0, max(0, v_dim - width))) for t in (q, k))
    buffer = q.new_zeros(batch * heads * blocks[0][1] * problem.kv_len, dtype=dtype)
    # Heads inside tokens, as the kernel itself writes, so that joining heads costs no copy.
    out = q.new_empty(batch, q_len, heads, v_dim).transpose(1, 2)
    gather = None if problem.term is None else problem.term.gather
    wide = (
        None
        if gather is None
        else [native.in_one_piece(t.to(dtype)) for t in (problem.q, problem.k)]
    )
    lse = q.new_empty(batch, heads, q_len, dtype=dtype) if problem.need_lse else None
    for start, stop in blocks:
        first, last = problem.reach(start, stop)
        part = problem.among(first, last)
        shape = (batch, heads, stop - start, last - first)
        added = part.with_term(buffer[: math.prod(shape)].view(shape).zero_(), start, stop)
        visible = part.hide(added, start, stop, -torch.inf)
        keys, values = k[:, :, first:last], v[:, :, first:last]
        if visible is not None:  # what nobody sees may hold anything, NaN too
            unseen = ~visible.any(-2).any(1, keepdim=True)[..., None]
            keys, values = keys.masked_fill(unseen, 0), values.masked_fill(unseen, 0)
        found, found_lse = _fused(q[:, :, start:stop], keys, values, added, problem.scale)
        if visible is not None and not problem.every_row_sees_a_key:
            blind = ~visible.any(-1)
            found = found.masked_fill(blind[..., None], 0)
            found_lse = found_lse.masked_fill(blind, -torch.inf)
        if gather is not None and wide is not None:
            near = wide[0][:, :, start:stop], wide[1][:, :, first:last]
            where = slice(start, stop), part.span
            more = gather(*near, problem.scale, added, found_lse, *where).to(found.dtype)
            torch.add(found, more, out=out[:, :, start:stop])
        else:
            out[:, :, start:stop] = found[..., :v_dim]
        if lse is not None:
            lse[:, :, start:stop] = found_lse
    return out, lse


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, by whichever kernel is faster."""
    plain = q.dtype == torch.bfloat16 and not followed(q, k, v)
    if plain and by_head.compiled() is not None:
        return by_head.attend_with(q, k, v, mask, scale)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=mask, scale=scale
    )
