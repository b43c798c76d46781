"""Attention with a bias by distance, strip by strip of queries: gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.attend.ways import flash
from posenc.attend.ways.strips_forward import Group, Strip, forward, reversed_bias
from posenc.attend.ways.twice import dense_gradients
from posenc.numbers.heads import for_every_head
from posenc.numbers.precision import at_least_float32, without_autocast

ROWS, BYTES = 128, 8 * 2**20
"""Queries whose scores are materialized at once, fewer where these take more bytes."""
KEYS = 4096
"""Keys that torch's backward kernel sees at once: its results are copies."""


class Strips(torch.autograd.Function):
    """Attend forward; backward without scores for all pairs at once.

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
        if torch.is_grad_enabled():  # a gradient of this gradient is asked for
            entry = torch.arange(q.shape[2] - 1, -1, -1)[:, None] + torch.arange(k.shape[2])
            bias = row[:, entry.to(row.device)]
            found = dense_gradients((q, k, v, row), bias, bias == -torch.inf, ctx.scale, grads)
            return *found, None, None
        grad = torch.zeros_like(out) if grad is None else grad
        heads, row = q.shape[1], row.contiguous()
        all_k, all_v = (for_every_head(t, heads) for t in (k, v))
        with without_autocast(q.device):  # backward may be called inside it
            if ctx.needs_input_grad[3] or grad_lse is not None:
                found = _all_gradients(q, all_k, all_v, row, grad, grad_lse, ctx.scale, ctx.strips)
            else:
                found = _gradients(q, all_k, all_v, row, out, lse, grad, ctx.scale, ctx.strips)
        d_q, d_k, d_v, d_row = found
        d_k, d_v = (_of_groups(d, t) for d, t in ((d_k, k), (d_v, v)))
        return d_q.to(q.dtype), d_k, d_v, d_row, None, None


def _of_groups(grad: Tensor, t: Tensor) -> Tensor:
    """Return the gradient of t, whose heads served groups of heads, in the dtype of t."""
    if grad.shape[1] != t.shape[1]:
        grad = grad.unflatten(1, (t.shape[1], -1)).sum(2)
    return grad.to(t.dtype)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, out: Tensor, lse: Tensor, grad: Tensor,
    scale: float, strips: list[Strip],
) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
    """Return the gradients of q, k and v by torch's own kernel, where the row is constant."""
    width, v_dim, wide = q.shape[-1], v.shape[-1], at_least_float32(q.dtype)
    q, k, v = flash.same_width(q, k, v)
    _, grad, out = flash.same_width(q, grad, out) if v_dim < width else (q, grad, out)
    grad, out = flash.adjacent(grad), flash.adjacent(out)
    d_qs, d_k, d_v = [], *(torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k, v))
    for strip in strips:
        rows = slice(strip.start, strip.stop)
        reverse = [t[:, :, rows].flip(2) for t in (grad, q, out, lse)]
        d_rows = torch.zeros_like(reverse[1], dtype=wide)
        for first in range(strip.first, strip.last, KEYS):
            part = strip._replace(first=first, last=min(first + KEYS, strip.last))
            keys, bias = slice(part.first, part.last), reversed_bias(row, q.shape[2], part)
            mine, theirs = (reverse[0], reverse[1]), (k[:, :, keys], v[:, :, keys])
            more = flash.gradients(*mine, *theirs, reverse[2], reverse[3], bias, scale)
            d_rows += more[0]
            d_k[:, :, keys] += more[1]
            d_v[:, :, keys] += more[2]
        d_qs.append(d_rows.flip(2))
    return torch.cat(d_qs, 2)[..., :width], d_k[..., :width], d_v[..., :v_dim], None


def _all_gradients(
    q: Tensor, k: Tensor, v: Tensor, row: Tensor, grad: Tensor, grad_lse: Tensor | None,
    scale: float, strips: list[Strip],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and the row by plain products. That of the row sums those of
    the scores along their diagonals in a fixed order: the same bits from run to run."""
    wide, (batch, heads, q_len, _) = row.dtype, q.shape
    k, v = k.to(wide), v.to(wide)
    d_qs, d_k, d_v, d_row = [], torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(row)
    for strip in _finer(strips, batch * heads * row.element_size()):
        start, stop, first, last = strip
        rows, keys = stop - start, last - first
        queries, grads = (t[:, :, start:stop].flip(2).to(wide) for t in (q, grad))
        k_part, v_part = k[:, :, first:last], v[:, :, first:last]
        bias = reversed_bias(row, q_len, strip)
        scores = (queries * scale) @ k_part.mT
        # Normalised here: far from the start the log-sum-exp is too coarse for weights that sum to
        # one.
        weights = torch.softmax(scores.add_(bias), -1)
        weights = _without_blind_rows(weights, bias)
        d_v[:, :, first:last] += weights.mT @ grads
        d_scores = (grads @ v_part.mT).mul_(weights)
        # The sum is of these weights, not of the rounded output: what all keys share must cancel.
        d_scores.addcmul_(weights, d_scores.sum(-1, keepdim=True), value=-1)
        if grad_lse is not None:
            d_scores.addcmul_(weights, grad_lse[:, :, start:stop, None].flip(2).to(wide))
        # Row i of the sheared buffer has row i of d_scores shifted right by i, so that diagonals
        # are columns.
        sheared = torch.zeros(heads, rows, rows + keys, dtype=wide, device=row.device)
        diagonal = (rows * (rows + keys), rows + keys + 1, 1)
        sheared.as_strided((heads, rows, keys), diagonal).copy_(d_scores.sum(0))
        offset = q_len - stop + first
        d_row[:, offset : offset + rows + keys - 1] += sheared.sum(1)[:, :-1]
        d_qs.append((d_scores @ k_part).mul_(scale).flip(2))
        d_k[:, :, first:last] += d_scores.mT @ queries
    return torch.cat(d_qs, 2), d_k.mul_(scale), d_v, d_row


def _without_blind_rows(weights: Tensor, bias: Tensor) -> Tensor:
    """Return the weights with zeros in rows that see no key, where softmax gives NaN."""
    blind = bias.amax(-1, keepdim=True) == -torch.inf
    return weights.masked_fill_(blind, 0) if bool(blind.any()) else weights


def _finer(strips: list[Strip], row_bytes: int) -> list[Strip]:
    """Return the same pairs in strips small enough for materialized scores."""
    finer = []
    for strip in strips:
        rows = min(ROWS, max(16, BYTES // (row_bytes * (strip.last - strip.first))))
        for start in range(strip.start, strip.stop, rows):
            finer.append(strip._replace(start=start, stop=min(start + rows, strip.stop)))
    return finer
