"""The backward pass of a bias that depends only on the distance, block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from posenc.numbers.heads import grouped_matmul
from posenc.numbers.precision import at_least_float32

ROWS, BYTES = 128, 16 * 2**20
"""Queries per block of the backward pass, fewer where one block's scores would take more bytes."""

Block = tuple[int, int, int, int]
"""start, stop, first, last: queries start .. stop over keys first .. last."""


def hankel(table: Tensor, q_len: int, block: Block) -> Tensor:
    """(1, num_heads, rows, keys) of bias for a block whose queries are in falling order. Torch's
    kernel is taken for masks with four axes only."""
    start, stop, first, last = block
    offset = table.storage_offset() + q_len - stop + first
    shape = (1, table.shape[0], stop - start, last - first)
    return table.as_strided(shape, (0, table.stride(0), 1, 1), offset)


def rows_in_memory(t: Tensor) -> Tensor:
    """t, copied where its channels do not lie side by side: torch's kernel reads as if they did."""
    return t if t.stride(-1) == 1 else t.clone(memory_format=torch.contiguous_format)


def kernel_gradients(q, k, v, table, out, lse, grad_out, ctx) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own backward kernel, block by block, where only q, k and v need a gradient."""
    grad_out = rows_in_memory(grad_out)
    d_q = torch.empty_like(q)
    d_k, d_v = (torch.zeros(t.shape, dtype=at_least_float32(t.dtype)) for t in (k, v))
    for block in ctx.blocks:
        start, stop, first, last = block
        rows = slice(start, stop)
        part = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out[:, :, rows].flip(2), q[:, :, rows].flip(2), k[:, :, first:last],
            v[:, :, first:last], out[:, :, rows].flip(2), lse[:, :, rows].flip(2), 0.0, False,
            attn_mask=hankel(table, q.shape[2], block), scale=ctx.scale,
        )  # fmt: skip
        d_q[:, :, rows] = part[0].flip(2)
        d_k[:, :, first:last] += part[1]
        d_v[:, :, first:last] += part[2]
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def table_gradients(
    q, k, v, table, grad_out, grad_lse, ctx
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All four gradients by plain matmuls per block, dS summed along its diagonals in a fixed
    order: bit-identical from run to run."""
    wide = table.dtype
    batch, heads, q_len, _ = q.shape
    groups = k.shape[1]
    k, v = (t.to(wide).flatten(0, 1) for t in (k, v))  # (batch * kv heads, kv_len, width)
    d_q = torch.empty(q.shape, dtype=wide)
    d_k, d_v, d_table = torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(table)

    def block_rows(t: Tensor) -> Tensor:  # (batch * kv heads, heads per kv head * rows, width)
        return t[:, :, start:stop].flip(2).to(wide).reshape(batch * groups, -1, t.shape[-1])

    for block in _finer(ctx.blocks, batch * heads * table.element_size()):
        start, stop, first, last = block
        rows, keys = stop - start, last - first
        full = (batch, heads, rows, keys)
        q_rows, grad_rows = block_rows(q), block_rows(grad_out)
        k_keys, v_keys = k[:, first:last], v[:, first:last]
        weights = torch.bmm(q_rows * ctx.scale, k_keys.mT)
        bias = hankel(table, q_len, block)
        weights.view(full).add_(bias)
        # Normalised here: far out lse is too coarse for weights that sum to one.
        torch.softmax(weights, -1, out=weights)
        if bool(weights[..., 0].isnan().any()):  # of a row that sees no key, for one
            sees_none = bias.amax(-1, keepdim=True) == -torch.inf
            weights.view(full).masked_fill_(sees_none, 0)
        d_v[:, first:last].baddbmm_(weights.mT, grad_rows)
        d_weights = torch.bmm(grad_rows, v_keys.mT)
        # The sum over keys is of these weights, not of the rounded output: what all keys share
        # would not cancel.
        d_scores = torch.ops.aten._softmax_backward_data.out(
            d_weights, weights, -1, wide, grad_input=d_weights
        )
        if grad_lse is not None:
            d_scores.addcmul_(weights, block_rows(grad_lse[..., None]))
        # Row i of the buffer holds row i of dS shifted right by i, so that columns are diagonals.
        buffer = torch.zeros(heads, rows, rows + keys, dtype=wide)
        skewed = (rows * (rows + keys), rows + keys + 1, 1)
        buffer.as_strided(full[1:], skewed).copy_(d_scores.view(full).sum(0))
        offset = q_len - stop + first
        d_table[:, offset : offset + rows + keys - 1] += buffer.sum(1)[:, :-1]
        d_q[:, :, start:stop] = torch.bmm(d_scores, k_keys).view(batch, heads, rows, -1).flip(2)
        d_k[:, first:last].baddbmm_(d_scores.mT, q_rows)
    d_k = d_k.mul_(ctx.scale).view(batch, groups, *d_k.shape[1:])
    return d_q.mul_(ctx.scale), d_k, d_v.view(batch, groups, *d_v.shape[1:]), d_table


def differentiable_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    scale: float,
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients of q, k, v and the table as functions that have gradients themselves."""
    entry = torch.arange(q.shape[2] - 1, -1, -1)[:, None] + torch.arange(k.shape[2])
    bias = table[:, entry]
    return dense_gradients((q, k, v, table), bias, bias == -torch.inf, scale, grads)


def dense_gradients(
    inputs: tuple[Tensor, ...],
    bias: Tensor,
    hidden: Tensor,
    scale: float,
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """The gradients of inputs, which are q, k, v and what the bias was computed from, by plain
    operations with all scores at once; they have gradients themselves. `grads` are those of the
    results and of the log-sum-exp."""
    q, k, v = inputs[:3]
    scores = grouped_matmul(q.to(bias.dtype) * scale, k.to(bias.dtype).mT)
    scores = (scores + bias.masked_fill(hidden, 0)).masked_fill(hidden, torch.finfo(bias.dtype).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    outputs = grouped_matmul(weights, v.to(bias.dtype)).to(q.dtype), scores.logsumexp(-1)
    given = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if grad is not None]
    wanted = [t for t in inputs if t.requires_grad]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in given], wanted, [grad for _, grad in given], create_graph=True,
            allow_unused=True,
        )
    )  # fmt: skip
    return [next(found) if t.requires_grad else None for t in inputs]


def _finer(blocks: Sequence[Block], row_bytes: int) -> list[Block]:
    """The same pairs in blocks small enough for the backward pass."""
    finer = []
    for start, stop, first, last in blocks:
        rows = min(ROWS, max(16, BYTES // (row_bytes * (last - first))))
        for s in range(start, stop, rows):
            e = min(s + rows, stop)
            finer.append((s, e, first, last))
    return finer
