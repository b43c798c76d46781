"""A bias that is a term of the query minus a term of the key, as one row of numbers for a block of
queries: torch's flash kernel forward and backward, without n x n."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.kernels import split
from posenc.attend.kernels.cost import largest_norms, negligible
from posenc.attend.kernels.toeplitz_gradients import dense_gradients, rows_in_memory
from posenc.attend.problem import Problem
from posenc.numbers.heads import for_every_head
from posenc.numbers.precision import at_least_float32

HALF_ROWS = 1024
"""Up to this many queries of half types are one block: what would be rounded in large numbers, or
left out as negligible, is less than a second call and joining its results cost."""


def refuse(problem: Problem) -> str | None:
    """Why this cannot compute a call that is_causal fits."""
    if problem.q.device.type != "cpu":
        return "CUDA's kernels would write the row out"
    if problem.v.shape[-1] != problem.q.shape[-1]:
        return "torch's kernel wants values of the width of queries"
    return None


def run(problem: Problem) -> Tensor:
    """Causal attention over equal runs: block by block, earlier keys and the block's own apart,
    since one row of bias serves all queries and is_causal does the rest."""
    row, key = split.terms(problem)
    q, k, v = problem.q, problem.k, problem.v
    if not problem.needs_grad:
        return _forward(q, k, v, _Rows.of(q, k, row, key, problem.scale), problem.scale)[0]
    k, v = (for_every_head(t, q.shape[1]) for t in (k, v))  # the backward kernel has no groups
    return _Attention.apply(q, k, v, row, key, problem.scale)  # type: ignore[return-value]


@dataclass(frozen=True)
class _Rows:
    """The terms of queries and keys, (batch or 1, num_heads, len), for `size` queries at a time.

    Earlier keys that no query of a block can give more than a negligible weight are left out: no
    score is further from zero than the norms of q and k allow, and a query sees its own key.
    `least` is what the bias of a key must reach, (batch, num_heads).
    """

    row: Tensor
    key: Tensor
    least: Tensor
    size: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, row: Tensor, key: Tensor, scale: float) -> _Rows:
        dtype = at_least_float32(q.dtype)
        one = q.shape[2] <= HALF_ROWS and q.dtype != dtype
        size = HALF_ROWS if one else split.block_rows(key)
        if q.shape[2] <= size:  # one block has no earlier keys
            return cls(row, key, key.new_full(q.shape[:2], -torch.inf), size)
        q_size, k_size = (largest_norms(t, dtype) for t in (q, k))
        spread = 2 * abs(scale) * q_size * for_every_head(k_size, q.shape[1])
        least = (row - key).amin(-1) - spread + negligible(dtype)
        return cls(row, key, least, size)

    def blocks(self, dtype: torch.dtype) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
        """start, stop, first, the bias of the keys before `stop` (batch, num_heads, stop), -inf
        for those left out, and where all earlier keys are (batch, num_heads, 1); the first key that
        some head keeps is `first`."""
        batch, length = len(self.least), self.key.shape[-1]
        for start in range(0, length, self.size):
            stop = min(start + self.size, length)
            bias = self.row[..., (start + stop) // 2, None] - self.key[..., :stop]
            nearest = self.row[..., start:stop].amax(-1, keepdim=True)
            lost = nearest - self.key[..., :start] < self.least[..., None]
            bias = bias.to(dtype).expand(batch, -1, -1).contiguous()
            bias[..., :start].masked_fill_(lost, -torch.inf)
            kept = torch.nonzero(~lost.flatten(0, 1).all(0))
            first = int(kept[0]) if len(kept) else start
            yield start, stop, first, bias, lost[..., first:].all(-1, keepdim=True)


def _forward(q: Tensor, k: Tensor, v: Tensor, rows: _Rows, scale: float) -> tuple[Tensor, Tensor]:
    """out and the log-sum-exp of scores whose bias counts from the middle of their block."""
    # torch's kernel reads channels as if they lay side by side.
    q, k, v = (rows_in_memory(t) for t in (q, k, v))
    dtype = at_least_float32(q.dtype)
    batch, heads, q_len, width = q.shape
    # Heads inside tokens, as the kernel itself writes, so that joining heads costs no copy.
    out = q.new_empty(batch, q_len, heads, width).transpose(1, 2)
    lse = q.new_empty(batch, heads, q_len, dtype=dtype)

    def flash(start: int, stop: int, first: int, last: int, bias: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], 0.0, start == first,
            attn_mask=_mask(bias, start, stop, first, last), scale=scale,
        )  # fmt: skip

    for start, stop, first, bias, all_lost in rows.blocks(dtype):
        own, own_lse = flash(start, stop, start, stop, bias)
        if stop - start == q_len:
            return own, own_lse
        if first < start:
            past, past_lse = flash(start, stop, first, start, bias)
            past_lse = past_lse.masked_fill(all_lost, -torch.inf)
            own = own.lerp(past, (past_lse - own_lse).sigmoid()[..., None].to(own.dtype))
            own_lse = torch.logaddexp(own_lse, past_lse)
        out[:, :, start:stop] = own
        lse[:, :, start:stop] = own_lse
    return out, lse


def _mask(bias: Tensor, start: int, stop: int, first: int, last: int) -> Tensor:
    return bias[:, :, None, first:last].expand(-1, -1, stop - start, -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: Tensor, key: Tensor, scale: float
    ) -> Tensor:
        rows = _Rows.of(q, k, row, key, scale)
        out, lse = _forward(q, k, v, rows, scale)
        ctx.save_for_backward(q, k, v, row, key, out, lse, rows.least)
        ctx.scale, ctx.size = scale, rows.size
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, row, key, out, lse, least = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is asked for
            bias = row[..., :, None] - key[..., None, :]
            hidden = torch.ones(bias.shape[-2:], dtype=torch.bool).triu(1)
            return *dense_gradients((q, k, v, row, key), bias, hidden, ctx.scale, grads), None
        rows = _Rows(row, key, least, ctx.size)
        counted = ctx.needs_input_grad[4]
        return *_gradients(q, k, v, out, lse, rows, ctx.scale, grads[0], counted), None


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: _Rows, scale: float,
    grad_out: Tensor, counted: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Of q, k, v, row and key; that of row is nothing, as the query's term cancels in the softmax.

    Where `counted`, q has a column of ones and k one of zeros, whose gradient sums the gradients of
    a key's scores: that of its term.
    """
    width, dtype = q.shape[-1], at_least_float32(q.dtype)
    q, k, v, out, grad_out = (rows_in_memory(t) for t in (q, k, v, out, grad_out))
    if counted:
        room = (0, 8)  # kernels like widths that are a multiple of 8
        q, k, v, out, grad_out = (F.pad(t, room) for t in (q, k, v, out, grad_out))
        q[..., width] = 1
    d_q = torch.zeros_like(q)
    d_k, d_v = (torch.zeros(t.shape, dtype=dtype) for t in (k, v))
    for start, stop, first, bias, _ in rows.blocks(dtype):
        mine = slice(start, stop)
        for begin, end in ((first, start), (start, stop)):
            if begin == end:
                continue
            theirs = slice(begin, end)
            part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out[:, :, mine], q[:, :, mine], k[:, :, theirs], v[:, :, theirs],
                out[:, :, mine], lse[:, :, mine], 0.0, begin == start,
                attn_mask=_mask(bias, start, stop, begin, end), scale=scale,
            )  # fmt: skip
            d_q[:, :, mine] += part[0]
            d_k[:, :, theirs] += part[1]
            d_v[:, :, theirs] += part[2]
    d_key = None
    if counted:
        d_key = -d_k[..., width] / scale
        d_key = d_key.sum_to_size(rows.key.shape).to(rows.key.dtype)
    d_q, d_k, d_v = (t[..., :width].to(q.dtype) for t in (d_q, d_k, d_v))
    return d_q, d_k, d_v, None, d_key
