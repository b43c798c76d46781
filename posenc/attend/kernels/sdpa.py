"""torch's own kernels: where nothing needs to see the scores, or the bias can be handed to them
without writing it out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.kernels import split, split_rows, toeplitz, toeplitz_forward, toeplitz_gradients
from posenc.attend.kernels.cost import Cost, scores_bytes
from posenc.attend.problem import Problem
from posenc.encoding.base import check_heads
from posenc.numbers.precision import at_least_float32, without_autocast
from posenc.numbers.tracking import transformed
from posenc.terms.dense import Dense

MASKED_ROWS = 256
"""Queries that share one mask written out."""
FEW = 8
"""Up to this many queries, a row of bias for each is handed over as a mask."""


def refuse(problem: Problem) -> str | None:
    if transformed():
        return "torch.func's transforms do not reach into its kernels"
    if problem.dropout_p:
        return "only reference and blockwise apply dropout"
    if takes_rows(problem) or (problem.term is None and not problem.need_lse):
        return None
    why_not = toeplitz.refuse(problem)
    if why_not is None:
        return None
    if problem.need_lse:
        return f"the log-sum-exp comes from the query blocks, and {why_not}"
    if problem.term is not None and (why := split.refuse(problem)):
        return f"{why_not}; {why}"
    return None


def cost(problem: Problem) -> Cost:
    size = problem.q.element_size()
    batch, heads = problem.q.shape[:2]
    if takes_rows(problem):
        rows = scores_bytes(problem, problem.q_len)
        return Cost(visible_time(problem), int(rows * (1 + problem.term.held(False))))  # type: ignore[union-attr]
    if takes_blocks(problem):
        grouped = problem.k.shape[1] != heads
        at_once = heads if grouped else toeplitz_forward.heads_at_once(heads, problem.q_len)
        rows = at_once * min(problem.q_len, toeplitz_forward.GROUP)
        block = 2 * batch * rows * problem.q.shape[-1] * size
        backward = 0
        if problem.needs_grad:
            scores = scores_bytes(problem, min(problem.q_len, toeplitz_gradients.ROWS))
            backward = 3 * min(toeplitz_gradients.BYTES, scores) + 4 * problem.k.numel()
        return Cost(
            visible_time(problem), 4 * heads * (problem.q_len + problem.kv_len) + block + backward
        )
    dense_mask = 0
    if problem.mask is not None and not is_plain_causal(problem):  # torch makes numbers of it
        rows = problem.q_len if _mask_in_one(problem) else min(problem.q_len, MASKED_ROWS)
        dense_mask = batch * rows * problem.kv_len * (1 + size)
        dense_mask += size * (problem.k.numel() + problem.v.numel())  # without what nobody sees
    folded = 0
    if problem.term is not None:
        folded = sum(
            t.numel() + t.numel() // t.shape[-1] * 8 for t in (problem.q, problem.k, problem.v)
        )
    if problem.v.shape[-1] < problem.q.shape[-1]:  # v and the output as wide as q
        folded += problem.q.numel() + problem.k.numel()
    if problem.needs_grad:  # what the kernel makes of the three on the way back
        folded += max(folded, problem.q.numel() + problem.k.numel())
    return Cost("O(q_len * kv_len)", dense_mask + folded * size)


def visible_time(problem: Problem) -> str:
    mask = problem.mask
    if mask is not None and mask.window is not None:
        return f"O(q_len * {min(mask.window, problem.kv_len)})"
    return "O(q_len * kv_len)"


def takes_blocks(problem: Problem) -> bool:
    """Whether the call goes through query blocks, and not to the kernel in one piece."""
    needed = problem.term is not None or problem.need_lse or _is_window(problem)
    otherwise = takes_rows(problem) or takes_one_row(problem)
    return needed and toeplitz.refuse(problem) is None and not otherwise


def takes_one_row(problem: Problem) -> bool:
    """Whether a bias that is a term per key goes to the kernel as one row for all queries, which in
    half types costs it less than a table of distances."""
    short = problem.q.dtype.itemsize == 2 and problem.q_len <= split_rows.HALF_ROWS
    forward = short and not problem.needs_grad and not problem.need_lse
    return (
        forward
        and split.refuse(problem) is None
        and is_plain_causal(problem)
        and split_rows.refuse(problem) is None
    )


def takes_rows(problem: Problem) -> bool:
    """Whether the bias of each query is handed over as a mask: for a few it is cheaper than
    columns that all keys carry, or a table of all distances."""
    watched = problem.needs_grad or torch.compiler.is_compiling()
    few = problem.q_len <= FEW and problem.q.device.type == "cpu" and not watched
    return few and isinstance(problem.term, Dense) and not problem.need_lse


def _is_window(problem: Problem) -> bool:
    return problem.mask is not None and problem.mask.window is not None


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    if takes_rows(problem):
        problem, bias = with_rows(problem)
        return _kernel(problem, 0, problem.q_len, bias=bias), None
    if takes_blocks(problem):
        return toeplitz.run(problem)
    if problem.term is not None:
        if is_plain_causal(problem) and split_rows.refuse(problem) is None:
            return split_rows.run(problem), None
        return split.run_folded(problem, _kernel), None
    if is_plain_causal(problem):
        return _kernel(problem, 0, problem.q_len, causal=True), None
    if problem.mask is None or _mask_in_one(problem):
        return _kernel(problem, 0, problem.q_len), None
    starts = range(0, problem.q_len, MASKED_ROWS)
    blocks = [(start, min(start + MASKED_ROWS, problem.q_len)) for start in starts]
    outs = [_kernel(problem.among(*problem.reach(*block)), *block) for block in blocks]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2), None


def with_rows(problem: Problem) -> tuple[Problem, Tensor]:
    """The problem, whose queries may have taken a part of the term, and the bias of each query."""
    term = problem.term
    assert isinstance(term, Dense)
    turned = 2 in problem.encoding.claims.places  # and the keys are others than the term's
    rounded = problem.product_dtype != problem.q.dtype
    if term.fold is None or turned or rounded:
        return problem, _rows(problem)
    with without_autocast(problem.q.device):
        added, bias = term.fold(problem.scale)
        return replace(problem, q=problem.q + added), bias


def _rows(problem: Problem) -> Tensor:
    """The bias of each query, (batch or 1, num_heads, q_len, kv_len)."""
    term, dtype = problem.term, at_least_float32(problem.q.dtype)
    assert isinstance(term, Dense)
    farthest = None if term.by_distance is None else toeplitz.distance_run(problem)
    if term.by_distance is None or farthest is None:
        with without_autocast(problem.q.device):
            return term.values(slice(0, problem.q_len), problem.span).to(dtype)
    rows, keys = problem.q_len, problem.kv_len
    table = term.by_distance(farthest, rows + keys - 1, problem.q)
    check_heads(problem.encoding, table.shape[0], problem.q)
    if rows == 1:
        return table[None, :, None]
    return torch.stack([table[:, i : i + keys] for i in range(rows - 1, -1, -1)], 1)[None]


def _mask_in_one(problem: Problem) -> bool:
    """Whether the mask is written out for all queries: the backward pass keeps it anyhow, and
    a compiled graph is for any length."""
    return problem.needs_grad or torch.compiler.is_compiling()


def _kernel(
    problem: Problem, start: int, stop: int, *, causal: bool = False, bias: Tensor | None = None
) -> Tensor:
    """torch's kernel for queries start .. stop."""
    visible = None if causal else problem.visible(start, stop)
    if visible is not None:
        # Every axis in full, else torch falls back to its dense path.
        visible = visible.expand(*visible.shape[:-2], stop - start, problem.kv_len)
    q, k, v = problem.q, problem.k, problem.v
    q = q if stop - start == q.shape[2] else q[:, :, start:stop]
    if visible is not None:  # what nobody sees may hold anything, NaN too
        unseen = ~visible.any(-2).any(1, keepdim=True)[..., None]
        k, v = k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    width, v_dim = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, width - v_dim)) if v_dim < width else v
    mask = visible
    if bias is not None:
        mask = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
        mask = mask.expand(*problem.q.shape[:2], stop - start, problem.kv_len)
        q, k, v = (t.to(problem.product_dtype) for t in (q, k, v))
    with nullcontext() if bias is None else without_autocast(q.device):  # it would round the bias
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=problem.scale,
            enable_gqa=bool(q.shape[1] != k.shape[1]),  # a trace counts in tensors
        )  # fmt: skip
    if visible is not None and not problem.every_row_sees_a_key:
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0)
    return out if v_dim >= width else out[..., :v_dim]


def is_plain_causal(problem: Problem) -> bool:
    """Whether the mask is what is_causal means: queries and keys are the same run of positions."""
    mask = problem.mask
    if mask is None or not (mask.exact and mask.causal and mask.window is None):
        return False
    runs = problem.mask_runs
    return problem.q_len == problem.kv_len and runs is not None and runs[0] == runs[1]
