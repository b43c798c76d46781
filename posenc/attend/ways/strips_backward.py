"""Compute gradients of attention with a bias by distance, by strips of queries."""

import math
from typing import Any

import torch
from torch import Tensor

from posenc.attend.ways import flash
from posenc.attend.ways.strips_forward import Group, Strip, forward, reversed_bias
from posenc.encodings.numbers.heads import for_every_head, grouped_matmul
from posenc.encodings.numbers.precision import at_least_float32, without_autocast

ROWS, BYTES = 128, 8 * 2**20
"""Queries whose scores are materialized at once, and the maximum bytes of these scores."""
KEYS = 4096
"""Keys per call of torch's backward kernel, which returns copies."""


class Strips(torch.autograd.Function):
    """Attend by strips, without materializing the scores of all pairs in the backward pass.

    Inputs: q (batch, num_heads, q_len, width), k and v (batch, num_kv_heads, kv_len, ...), row
    (num_heads, q_len + kv_len - 1), scale, groups. Outputs: out and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: Tensor, scale: float, groups: list[Group]
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, row, scale, groups)
        ctx.save_for_backward(q, k, v, row, out, lse)
        ctx.scale, ctx.strips = scale, [strip for group in groups for strip in group.strips]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, row, out, lse = ctx.saved_tensors
        grad, grad_lse = grads
        if torch.is_grad_enabled():  # for second derivatives
            bias = row.unfold(1, k.shape[2], 1).flip(1)
            return *dense_gradients((q, k, v, row), bias, ctx.scale, grads), None, None
        grad = torch.zeros_like(out) if grad is None else grad
        heads, row, d_row = q.shape[1], row.contiguous(), None
        all_k, all_v = (for_every_head(t, heads) for t in (k, v))
        with without_autocast(q.device):  # backward may be called inside it
            if ctx.needs_input_grad[3] or grad_lse is not None:
                given = (q, all_k, all_v, row, grad, grad_lse, ctx.scale, ctx.strips)
                *found, d_row = _all_gradients(*given)
            else:
                found = _gradients(q, all_k, all_v, row, out, lse, grad, ctx.scale, ctx.strips)
        return *map(of_groups, found, (q, k, v)), d_row, None, None


def of_groups(grad: Tensor, t: Tensor) -> Tensor:
    """Sum the gradient over query heads that share a head of t, in t's dtype."""
    if grad.shape[1] != t.shape[1]:
        grad = grad.unflatten(1, (t.shape[1], -1)).sum(2)
    return grad.to(t.dtype)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    scale: float, strips: list[Strip],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v by torch's own backward kernel."""
    width, v_dim, wide = q.shape[-1], v.shape[-1], at_least_float32(q.dtype)
    q, k, v, grad, out = flash.same_width(q, k, v, grad, out)
    d_q, d_k, d_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    bias, factor = without_tiny(q, k, row[None], lse, scale)
    row, lse = bias[0], lse - factor.log()
    for strip in strips:
        rows = slice(strip.start, strip.stop)
        mine = [t[:, :, rows].flip(2) for t in (grad, q, out, lse)]
        for first in range(strip.first, strip.last, KEYS):
            part = strip._replace(first=first, last=min(first + KEYS, strip.last))
            keys, bias = slice(part.first, part.last), reversed_bias(row, q.shape[2], part)
            theirs = k[:, :, keys], v[:, :, keys]
            found = flash.gradients(mine, theirs, bias, scale)
            d_q[:, :, rows] += found[0].flip(2)
            d_k[:, :, keys] += found[1]
            d_v[:, :, keys] += found[2]
            del found  # free its memory before the next part
    for each in (d_q, d_k, d_v):
        each.div_(factor[..., None])
    return d_q[..., :width], d_k[..., :width], d_v[..., :v_dim]


def without_tiny(
    q: Tensor, k: Tensor, bias: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return a bias of keys, (batch or 1, num_heads, keys), and a factor for the weights of each
    head, (num_heads, 1), with which no weight is below the smallest normal number: these take three
    times as long on Intel's CPUs. The bias is -inf where no weight can be larger; the factor is 1
    if no other weight can be smaller."""
    tiny = math.log(torch.finfo(bias.dtype).tiny)
    most = scale * q.norm(dim=-1).amax((0, 2)) * k.norm(dim=-1).amax((0, 2))  # largest score
    hidden = bias < (tiny + lse.amin((0, 2)) - most)[:, None]
    least = bias.masked_fill(hidden, torch.inf).amin((0, 2)) - most - lse.amax((0, 2))
    factor = (tiny - least).nan_to_num(0, 0, 0).clamp(0, 60).exp()  # 60: far from overflow
    return bias.masked_fill(hidden, -torch.inf), factor[:, None]


def _all_gradients(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, grad: Tensor, grad_lse: Tensor | None,
    scale: float, strips: list[Strip],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and the row by matrix products. The gradient of the row sums
    those of the scores along diagonals in a fixed order, so results are reproducible bit for bit.
    """
    d_q, d_k, d_v, d_row = (torch.zeros_like(t, dtype=row.dtype) for t in (q, k, v, row))
    size = q.shape[0] * ROWS * k.shape[2] * row.element_size()
    at_once = max(1, BYTES // size)  # heads whose scores of a strip are materialized
    for first in range(0, q.shape[1], at_once):
        mine = slice(first, first + at_once)
        tensors, into = ([t[:, mine] for t in each] for each in ((q, k, v, grad), (d_q, d_k, d_v)))
        own_lse = None if grad_lse is None else grad_lse[:, mine]
        for strip in strips:
            for start in range(strip.start, strip.stop, ROWS):
                part = strip._replace(start=start, stop=min(start + ROWS, strip.stop))
                _add_gradients(tensors, row[mine], own_lse, scale, part, [*into, d_row[mine]])
    return d_q, d_k, d_v, d_row


def _add_gradients(
    tensors: list[Tensor], row: Tensor, grad_lse: Tensor | None, scale: float, strip: Strip,
    into: list[Tensor],
) -> None:  # fmt: skip
    """Add the gradients from one strip of queries to `into`, those of q, k, v and the row."""
    (start, stop, first, last), wide, q_len = strip, row.dtype, tensors[0].shape[2]
    rows, keys = slice(start, stop), slice(first, last)
    queries, grads = (tensors[i][:, :, rows].flip(2).to(wide) for i in (0, 3))
    k, v = (tensors[i][:, :, keys].to(wide) for i in (1, 2))
    d_q, d_k, d_v, d_row = into
    bias = reversed_bias(row, q_len, strip)
    # Normalised here, because far from the start the log-sum-exp is too coarse for weights that sum
    # to 1.
    weights = torch.softmax(((queries * scale) @ k.mT).add_(bias), -1)
    blind = bias.amax(-1, keepdim=True) == -torch.inf
    if bool(blind.any()):  # queries that see no key
        weights.masked_fill_(blind, 0)
    d_v[:, :, keys] += weights.mT @ grads
    d_scores = (grads @ v.mT).mul_(weights)
    # Sum over these weights, not the rounded output, so that terms common to all keys cancel.
    d_scores.addcmul_(weights, d_scores.sum(-1, keepdim=True), value=-1)
    if grad_lse is not None:
        d_scores.addcmul_(weights, grad_lse[:, :, rows, None].flip(2).to(wide))
    del weights
    d_q[:, :, rows] += (d_scores @ k).mul_(scale).flip(2)
    d_k[:, :, keys] += (d_scores.mT @ queries).mul_(scale)
    # Row i of the buffer is row i of d_scores shifted right by i, so diagonals become columns.
    heads, count, width = len(row), stop - start, last - first
    sheared = torch.zeros(heads, count, count + width, dtype=wide, device=row.device)
    diagonal = (count * (count + width), count + width + 1, 1)
    sheared.as_strided((heads, count, width), diagonal).copy_(d_scores.sum(0))
    offset = q_len - stop + first
    d_row[:, offset : offset + count + width - 1] += sheared.sum(1)[:, :-1]


def dense_gradients(
    inputs: tuple[Tensor, ...], bias: Tensor, scale: float, grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Return the gradients of `inputs` (q, k, v and tensors of the bias, which is -inf for hidden
    pairs), by dense operations, which can be differentiated again. `grads` are the gradients of the
    output and the log-sum-exp."""
    (q, k, v), dtype, hidden = inputs[:3], bias.dtype, bias == -torch.inf
    scores = grouped_matmul(q.to(dtype) * scale, k.to(dtype).mT) + bias.masked_fill(hidden, 0)
    scores = scores.masked_fill(hidden, torch.finfo(dtype).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    outs = grouped_matmul(weights, v.to(dtype)).to(q.dtype), scores.logsumexp(-1)
    of, given = zip(*[p for p in zip(outs, grads, strict=False) if p[1] is not None], strict=True)
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(torch.autograd.grad(of, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if t.requires_grad else None for t in inputs]
