"""Compute gradients of attention with a bias by distance, by strips of queries."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.ways import flash
from posenc.attend.ways.second_derivatives import dense_gradients
from posenc.attend.ways.strips_forward import Plan, Strip, forward, reversed_bias
from posenc.encodings.numbers.heads import for_every_head
from posenc.encodings.numbers.precision import without_autocast

ROWS, BYTES = 128, 2 * 2**20
"""Queries whose scores are materialized at once, and the maximum bytes of these scores."""
KEYS = 4096
"""Keys per call of torch's backward kernel, which returns copies."""


class Strips(torch.autograd.Function):
    """Attend by strips, without materializing the scores of all pairs in the backward pass.

    Inputs: q (batch, num_heads, q_len, width), k and v (batch, num_kv_heads, kv_len, ...), row
    (num_heads, q_len + kv_len - 1), scale, plan, and ends: how many of the row's first entries are
    one parameter of each head, and how many the mask does not hide. Outputs: out and the
    log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row: Tensor,
        scale: float,
        plan: Plan,
        ends: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, row, scale, plan)
        # Without a key the kernel's weights are exp(-inf - 0).
        ctx.save_for_backward(q, k, v, row, out, lse.masked_fill(lse == -torch.inf, 0))
        ctx.scale, ctx.plan, ctx.ends = scale, plan, ends
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, row, out, lse = ctx.saved_tensors
        grad, grad_lse = grads
        if torch.is_grad_enabled():  # for second derivatives
            bias = row.unfold(1, k.shape[2], 1).flip(1)
            return *dense_gradients((q, k, v, row), bias, ctx.scale, grads), None, None, None
        grad, row = torch.zeros_like(out) if grad is None else grad, row.contiguous()
        every = [q, *(for_every_head(t, q.shape[1]) for t in (k, v)), grad, out]
        if grad_lse is not None:
            # The kernel subtracts grad . out from the gradients of weights. With one more channel,
            # it adds grad_lse.
            every = [t.to(row.dtype) for t in every]
            every[3] = F.pad(every[3], (0, 1), value=1)
            every[4] = torch.cat([every[4], -grad_lse[..., None]], -1)
        tensors, d_row = [*flash.same_width(*every), lse], None
        with without_autocast(q.device):  # backward may be called inside it
            if ctx.needs_input_grad[3]:
                d_row = _of_row(tensors, row, grad_lse, ctx.scale, ctx.plan, ctx.ends)
            found = zip(_of_inputs(tensors, row, ctx.scale, ctx.plan), (q, k, v), strict=True)
        return *(of_groups(d[..., : t.shape[-1]], t) for d, t in found), d_row, None, None, None


def of_groups(grad: Tensor, t: Tensor) -> Tensor:
    """Sum the gradient over query heads that share a head of t, in t's dtype."""
    if grad.shape[1] != t.shape[1]:
        grad = grad.unflatten(1, (t.shape[1], -1)).sum(2)
    return grad.to(t.dtype)


def _of_inputs(tensors: list[Tensor], row: Tensor, scale: float, plan: Plan) -> list[Tensor]:
    """Return the gradients of q, k and v by torch's own backward kernel. `tensors`: q, k, v,
    gradient of out, out and log-sum-exp."""
    into = [torch.zeros_like(t, dtype=row.dtype) for t in tensors[:3]]
    for heads, _, groups in plan:
        q, k, v, grad, out, lse = (t[:, heads] for t in tensors)
        d_q, d_k, d_v = (t[:, heads] for t in into)
        for part in (part for group in groups for part in group.parts()):
            rows = slice(part.start, part.stop)
            mine = [t[:, :, rows].flip(2) for t in (grad, q, out, lse)]
            for first in range(part.first, part.last, KEYS):
                piece = part._replace(first=first, last=min(first + KEYS, part.last))
                keys, bias = slice(first, piece.last), reversed_bias(row[heads], q.shape[2], piece)
                found = flash.gradients(mine, (k[:, :, keys], v[:, :, keys]), bias, scale)
                d_q[:, :, rows] += found[0].flip(2)
                d_k[:, :, keys] += found[1]
                d_v[:, :, keys] += found[2]
                del found  # free its memory before the next part
    return into


def _of_row(
    tensors: list[Tensor],
    row: Tensor,
    grad_lse: Tensor | None,
    scale: float,
    plan: Plan,
    ends: tuple[int, int],
) -> Tensor:
    """Return the gradient of the row. It sums those of the scores along diagonals in a fixed order,
    so results are reproducible bit for bit. If the first entries are one parameter, only scores
    that read others are computed, because the gradients of a query's scores sum to 0."""
    d_row, (batch, _, q_len, _) = torch.zeros_like(row), tensors[0].shape
    if grad_lse is not None or tensors[0].dtype != row.dtype:
        ends = 0, ends[1]  # their sum is not 0, or too coarse
    keys = min(tensors[1].shape[2], ends[1] - ends[0] + ROWS)
    at_once = max(1, BYTES // max(1, batch * ROWS * keys * row.element_size()))
    for heads, _, groups in plan:
        for first in range(heads.start, heads.stop, at_once):
            mine = slice(first, min(first + at_once, heads.stop))
            own = [t[:, mine] for t in tensors]
            own_lse = None if grad_lse is None else grad_lse[:, mine]
            for strip in (strip for group in groups for strip in group.strips):
                for start in range(strip.start, strip.stop, ROWS):
                    part = strip._replace(start=start, stop=min(start + ROWS, strip.stop))
                    part = part.reading(q_len, *ends)
                    if part.first >= part.last:
                        continue
                    bias = reversed_bias(row[mine], q_len, part)
                    d_scores = _of_scores(own, bias, own_lse, scale, part, ends[0] == 0)
                    _add_diagonals(d_scores.sum(0), d_row[mine, q_len - part.stop + part.first :])
    if not ends[0]:
        return d_row
    rest = -d_row.sum(-1)
    if bool((rest.abs() < 1e-4 * d_row.abs().sum(-1)).any()):  # rounding would be much of it
        return _of_row(tensors, row, grad_lse, scale, plan, (0, ends[1]))
    d_row[:, ends[0] - 1] += rest
    return d_row


def _of_scores(
    tensors: list[Tensor],
    bias: Tensor,
    grad_lse: Tensor | None,
    scale: float,
    strip: Strip,
    whole: bool,
) -> Tensor:
    """Return the gradients of a strip's scores, with queries in reverse order. `whole`: the queries
    see no other keys."""
    rows, keys = slice(strip.start, strip.stop), slice(strip.first, strip.last)
    q, grad, out, lse = (tensors[i][:, :, rows].flip(2).to(bias.dtype) for i in (0, 3, 4, 5))
    k, v = (tensors[i][:, :, keys].to(bias.dtype) for i in (1, 2))
    scores, d_scores = ((q * scale) @ k.mT).add_(bias), grad @ v.mT
    if not whole:
        mean = (grad * out).sum(-1, keepdim=True)
        scores.sub_(lse[..., None]).clamp_(min=-80)  # exp is slow where it gives tiny numbers
        return d_scores.sub_(mean).mul_(scores.exp_())
    # Normalised here, because far from the start the log-sum-exp is too coarse for weights that sum
    # to 1. The mean is that by these weights, so that terms common to all keys cancel.
    weights = torch.softmax(scores, -1)
    blind = bias.amax(-1, keepdim=True) == -torch.inf
    if bool(blind.any()):  # queries that see no key
        weights.masked_fill_(blind, 0)
    d_scores.mul_(weights).addcmul_(weights, d_scores.sum(-1, keepdim=True), value=-1)
    if grad_lse is not None:
        d_scores.addcmul_(weights, grad_lse[:, :, rows, None].flip(2).to(bias.dtype))
    return d_scores


def _add_diagonals(d_scores: Tensor, d_row: Tensor) -> None:
    """Add the gradients of scores with queries in reverse order to that of the row they read."""
    # Row i of the buffer is row i of d_scores shifted right by i, so diagonals become columns.
    heads, count, width = d_scores.shape
    sheared = d_scores.new_zeros(heads, count, count + width)
    diagonal = (count * (count + width), count + width + 1, 1)
    sheared.as_strided((heads, count, width), diagonal).copy_(d_scores)
    d_row[:, : count + width - 1] += sheared.sum(1)[:, :-1]
