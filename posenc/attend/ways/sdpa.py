"""Attend by torch's scaled_dot_product_attention, without a bias or with one that it can read."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways import flash, key_rows, strips, strips_backward
from posenc.attend.ways.cost import Cost, scores_bytes
from posenc.encodings.numbers.precision import without_autocast

MASKED_ROWS = 256
"""Queries per call of the kernel if masks are materialized block by block, in inference."""


def run(problem: Problem, form: str) -> tuple[Tensor, Tensor | None]:
    """Attend in one of choose.FORMS: "plain", "row", "strips" or "key rows"."""
    if form == "strips":
        return strips.run(problem)
    if form == "key rows":
        return key_rows.run(problem)
    if form == "row":
        bias = problem.ready(problem.q_len).bias(0, problem.q_len)
        return _kernel(problem, 0, problem.q_len, bias), None
    all_seen = problem.all_visible(0, problem.q_len) == (0, problem.kv_len)
    if all_seen or problem.causal_by_index or _mask_in_one(problem):
        return _kernel(problem, 0, problem.q_len), None
    starts = range(0, problem.q_len, MASKED_ROWS)
    spans = [(start, min(start + MASKED_ROWS, problem.q_len)) for start in starts]
    outs = [_kernel(problem.among(*problem.maybe_visible(*span)), *span) for span in spans]
    return torch.cat(outs, dim=2), None


def cost(problem: Problem, form: str) -> Cost:
    """Return the expected time and memory of a form."""
    size, (batch, heads) = problem.q.element_size(), problem.q.shape[:2]
    mask, needs_grad = problem.mask, problem.needs_grad
    time = "O(q_len * kv_len)"
    if mask is not None and mask.window is not None:
        time = f"O(q_len * {min(mask.window, problem.kv_len)})"
    if form == "row":
        assert problem.term is not None
        rows = scores_bytes(problem, problem.q_len)
        return Cost(time, int(rows * (1 + problem.term.held(False))))
    if form == "strips":
        rows = min(problem.q_len, strips.TOGETHER)
        block = 3 * batch * heads * rows * problem.q.shape[-1] * size
        backward = 0
        if needs_grad:
            scores = scores_bytes(problem, min(problem.q_len, strips_backward.ROWS))
            backward = 3 * min(strips_backward.BYTES, scores) + 4 * problem.k.numel()
        row = 4 * heads * (problem.q_len + problem.kv_len)
        return Cost(time, row + problem.q.numel() * size + block + backward)
    dense_mask = 0
    if mask is not None and not problem.causal_by_index:  # torch converts it to floats
        rows = problem.q_len if _mask_in_one(problem) else min(problem.q_len, MASKED_ROWS)
        dense_mask = batch * rows * problem.kv_len * (1 + size)
        dense_mask += size * (problem.k.numel() + problem.v.numel())  # copies with hidden keys 0
    copied = 0
    if form == "key rows":  # a block's mask, and with gradients copies of q, k and v
        dense_mask = scores_bytes(problem, key_rows.ROWS) // max(1, problem.kv_len // key_rows.ROWS)
        if needs_grad:
            copied = 2 * sum(t.numel() for t in (problem.q, problem.k, problem.v))
    if problem.v.shape[-1] < problem.q.shape[-1]:  # v and the output as wide as q
        copied += problem.q.numel() + problem.k.numel()
    if needs_grad:  # the kernel's copies of the three in the backward pass
        copied += max(copied, problem.q.numel() + problem.k.numel())
    return Cost(time, dense_mask + copied * size)


def _mask_in_one(problem: Problem) -> bool:
    """Return True if one mask is materialized for all queries, because the backward pass keeps it
    anyway, or because a compiled graph must not depend on the length."""
    return problem.needs_grad or torch.compiler.is_compiling()


def _kernel(problem: Problem, start: int, stop: int, bias: Tensor | None = None) -> Tensor:
    """Attend from queries [start, stop) by torch's scaled_dot_product_attention."""
    causal = bias is None and problem.causal_by_index
    mask = visible = None if causal else problem.visible(start, stop)
    q, (k, v) = problem.q, flash.seen(visible, problem.k, problem.v)
    q = q if stop - start == q.shape[2] else q[:, :, start:stop]
    if bias is not None:
        mask, dtype = bias, problem.product_dtype
        mask = mask if visible is None else mask.masked_fill(~visible, -torch.inf)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if mask is not None:  # torch falls back to its dense path for fewer rows or keys
        mask = mask.expand(*mask.shape[:-2], stop - start, problem.kv_len)
    width, v_dim = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, width - v_dim)) if v_dim < width else v
    with nullcontext() if bias is None else without_autocast(q.device):  # it would round the bias
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=problem.scale,
            enable_gqa=bool(q.shape[1] != k.shape[1]),  # in a trace, sizes are tensors
        )  # fmt: skip
    if visible is not None and not problem.every_row_sees_a_key:
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0)
    return out if v_dim >= width else out[..., :v_dim]
