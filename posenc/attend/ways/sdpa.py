"""Attend by torch's scaled_dot_product_attention, without a bias or with one that it can read."""

import functools
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from posenc import masks
from posenc.attend.cost import Cost, scores_bytes
from posenc.attend.problem import Problem
from posenc.attend.ways import blocks, flash, key_rows, strips, strips_backward
from posenc.attend.ways.second_derivatives import twice_differentiable
from posenc.encodings.numbers.precision import without_autocast

NEAR_ROWS, MASKED_ROWS = 1024, 256
"""Queries that attend to near keys at a time; queries per call if masks are materialized."""


def run(problem: Problem, form: str) -> tuple[Tensor, Tensor | None]:
    """Attend in one of choose.FORMS."""
    if form == "near and far":
        return _near_and_far(problem)
    if form == "strips":
        return strips.run(problem)
    if form == "key rows":
        return key_rows.run(problem)
    if form == "row":
        return blocks.masked(problem.ready(problem.q_len), 0, problem.q_len)
    return twice_differentiable(problem, _plain(problem)), None


def _plain(problem: Problem) -> Tensor:
    """Attend without a term."""
    all_seen = problem.all_visible(0, problem.q_len) == (0, problem.kv_len)
    if all_seen or problem.causal_by_index or _mask_in_one(problem):
        return _kernel(problem, 0, problem.q_len)
    spans = [(i, min(i + MASKED_ROWS, problem.q_len)) for i in range(0, problem.q_len, MASKED_ROWS)]
    outs = [_kernel(problem.among(*problem.maybe_visible(*span)), *span) for span in spans]
    return torch.cat(outs, dim=2)


def cost(problem: Problem, form: str) -> Cost:
    """Return the expected time and memory of a form."""
    size, (batch, heads) = problem.q.element_size(), problem.q.shape[:2]
    mask, needs_grad = problem.mask, problem.needs_grad
    time = "O(q_len * kv_len)"
    if mask is not None and mask.window is not None:
        time = f"O(q_len * {min(mask.window, problem.kv_len)})"
    if form == "row":
        assert problem.term is not None
        held = 1 + problem.term.held(False)
        return Cost(time, int(held * scores_bytes(problem, problem.q_len)))
    if form == "strips":
        extra = 3 * batch * heads * min(problem.q_len, strips.TOGETHER) * problem.q.shape[-1] * size
        if needs_grad:
            scores = scores_bytes(problem, min(problem.q_len, strips_backward.ROWS))
            extra += 3 * min(strips_backward.BYTES, scores) + 4 * problem.k.numel()
        row = 4 * heads * (problem.q_len + problem.kv_len)
        return Cost(time, row + problem.q.numel() * size + extra)
    if form == "near and far":
        assert problem.term is not None and problem.term.far_from is not None
        near = 4 + 4.5 * problem.term.far_from / problem.q.shape[-1]
        copies = near * min(1, NEAR_ROWS / problem.q_len) + (12 if needs_grad else 2)
        return Cost(time, int(4 * copies * problem.q.numel()))
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


def _near_and_far(problem: Problem) -> tuple[Tensor, Tensor | None]:
    """Attend to far keys by strips, then to near keys by the term, NEAR_ROWS queries at a time."""
    term, n, (q, k, v) = problem.term, problem.q_len, (problem.q, problem.k, problem.v)
    assert term is not None and term.far_from is not None and term.attend_near and term.far
    first, last, attend_near, added = term.far_from, n - term.far_from, term.attend_near, term.far
    where, parts = range(last), {"q": q[:, :, first:], "k": k[:, :, :last], "v": v[:, :, :last]}
    mask = masks.causal.bind(where, where)
    found, found_lse = strips.run(replace(problem, **parts, mask=mask, term=None, need_lse=True))
    assert found_lse is not None
    far = torch.cat([torch.zeros_like(found[:, :, :1]).expand(-1, -1, first, -1), found], 2)
    far_lse = F.pad(found_lse, (first, 0), value=-torch.inf)  # the first queries see no far key

    def attend(start: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, start + NEAR_ROWS)
        keys = slice(max(0, start - first + 1), rows.stop)
        near = attend_near(q[:, :, rows], k[:, :, keys], v[:, :, keys])
        score, value = added(q[:, :, rows])
        return flash.join([near, (far[:, :, rows] + value, far_lse[:, :, rows] + score)])

    if problem.needs_grad:
        attend = functools.partial(checkpoint, attend, use_reentrant=False)
    with without_autocast(q.device):
        each = [attend(start) for start in range(0, n, NEAR_ROWS)]
    out, lse = (torch.cat(t, 2) for t in zip(*each, strict=True))
    return out.to(q.dtype), lse if problem.need_lse else None


def _mask_in_one(problem: Problem) -> bool:
    """Return True if one mask is materialized for all queries, because the backward pass keeps it
    anyway, or because a compiled graph must not depend on the length."""
    return problem.needs_grad or torch.compiler.is_compiling()


def _kernel(problem: Problem, start: int, stop: int) -> Tensor:
    """Attend from queries [start, stop) by torch's scaled_dot_product_attention."""
    causal = problem.causal_by_index
    mask = visible = None if causal else problem.visible(start, stop)
    q, (k, v) = problem.q, flash.seen(visible, problem.k, problem.v)
    q = q if stop - start == q.shape[2] else q[:, :, start:stop]
    if mask is not None:  # torch falls back to its dense path for fewer rows or keys
        mask = flash.adjacent(mask.expand(*mask.shape[:-2], stop - start, problem.kv_len))
    width, v_dim = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, width - v_dim)) if v_dim < width else v
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=problem.scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),  # in a trace, sizes are tensors
    )
    if visible is not None and not problem.every_row_sees_a_key:
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0)
    return out if v_dim >= width else out[..., :v_dim]
