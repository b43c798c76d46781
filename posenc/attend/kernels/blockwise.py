"""Query blocks, each with a plain softmax, recomputed in the backward pass: any encoding in memory
that grows with length alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.attend.kernels import reference
from posenc.attend.kernels.cost import Cost
from posenc.attend.problem import Call
from posenc.numbers.precision import at_least_float32

BLOCK_BYTES = 8 * 2**20
"""What one block of scores may take. Larger blocks leave the cache, smaller ones pay more for
their overhead."""


def refuse(call: Call) -> str | None:
    return None


def cost(call: Call) -> Cost:
    batch, heads = call.q.shape[:2]
    scores = batch * heads * block_rows(call) * call.kv_len * max(4, call.q.element_size())
    # Scores and what place 3 makes of them, and in the backward pass their gradients and the bias.
    return Cost("O(q_len * kv_len)", (6 if call.needs_grad else 2) * scores)


def block_rows(call: Call) -> int:
    """Queries per block: a power of two from 16 to 512 that keeps the scores in the cache."""
    batch, heads = call.q.shape[:2]
    row_bytes = batch * heads * call.kv_len * max(4, call.q.element_size())
    rows = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return min(512, max(16, 1 << (rows.bit_length() - 1)))


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    rows = block_rows(call)
    blocks = [(start, min(start + rows, call.q_len)) for start in range(0, call.q_len, rows)]
    if torch.compiler.is_compiling():
        return _join([reference.attend(call.keys(*call.reach(*b)), *b) for b in blocks])
    encoding = call.encoding.for_blocks(
        call.raw_q,
        call.raw_k,
        call.q_positions,
        call.kv_positions,
        rows,
        call.sees_no_later_position,
    )
    call = replace(call, encoding=encoding)
    if not call.needs_grad and not _autocast(call):
        return _in_place(call, blocks)
    attend = _recomputed if call.needs_grad else reference.attend
    return _join([attend(call.keys(*call.reach(*b)), *b) for b in blocks])


def _recomputed(call: Call, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    return checkpoint(  # type: ignore[return-value]
        reference.attend,
        call,
        start,
        stop,
        use_reentrant=False,
        preserve_rng_state=call.dropout_p > 0,
        determinism_check="none",
    )


def _join(results: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    lses = [lse for _, lse in results if lse is not None]
    return torch.cat([out for out, _ in results], dim=2), torch.cat(lses, dim=2) if lses else None


def _autocast(call: Call) -> bool:
    device = call.q.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _in_place(call: Call, blocks: list[tuple[int, int]]) -> tuple[Tensor, Tensor | None]:
    """The same in one buffer for all blocks' scores and weights: fresh memory costs more than what
    is done with it."""
    batch, heads, q_len = call.q.shape[:3]
    dtype = at_least_float32(call.q.dtype)
    call = replace(call, k=call.k.to(dtype).contiguous(), v=call.v.to(dtype).contiguous())
    buffer = call.q.new_empty(batch * heads * blocks[0][1] * call.kv_len, dtype=dtype)
    out = call.q.new_empty(batch, q_len, heads, call.v.shape[-1]).transpose(1, 2)
    lse = call.q.new_empty(batch, heads, q_len, dtype=dtype) if call.need_lse else None
    for start, stop in blocks:
        first, last = call.reach(start, stop)
        part = call.keys(first, last)
        size = batch * heads * (stop - start) * (last - first)
        scores = buffer[:size].view(batch, heads, stop - start, last - first)
        scores = part.scores(start, stop, out=scores)
        lowest = torch.finfo(scores.dtype).min
        seen_first, seen_last = (
            min(max(x - first, 0), last - first) for x in call.clear(start, stop)
        )
        for keys in ((0, seen_first), (seen_last, last - first)):
            visible = part.keys(*keys).visible(start, stop) if keys[0] < keys[1] else None
            if visible is not None:
                scores[..., slice(*keys)].masked_fill_(~visible, lowest)
        if lse is not None:
            lse[:, :, start:stop] = scores.logsumexp(-1)
        weights = torch.softmax(scores, -1, out=scores)
        visible = None if call.every_row_sees_a_key else part.visible(start, stop)
        if visible is not None:
            weights.masked_fill_(~visible, 0)
            if lse is not None:
                lse[:, :, start:stop].masked_fill_(~visible.any(-1), -torch.inf)
        if call.dropout_p:
            torch.nn.functional.dropout(weights, call.dropout_p, inplace=True)
        out[:, :, start:stop] = part.combine(weights, start, stop)
    return out, lse
