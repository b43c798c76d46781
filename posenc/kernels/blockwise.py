"""Query blocks, each with a plain softmax, recomputed in the backward pass: any encoding in memory
that grows with length alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from posenc.call import Call
from posenc.kernels import reference
from posenc.kernels.cost import Cost

BLOCK_BYTES = 16 * 2**20
"""What one block of scores may take. Larger blocks leave the cache, smaller ones pay more for
their overhead."""


def refuse(call: Call) -> str | None:
    return None


def cost(call: Call) -> Cost:
    batch, heads = call.q.shape[:2]
    scores = batch * heads * block_rows(call) * call.kv_len * max(4, call.q.element_size())
    # Scores and weights, and in the backward pass their gradients and the bias.
    return Cost("O(q_len * kv_len)", (6 if call.needs_grad else 3) * scores)


def block_rows(call: Call) -> int:
    """Queries per block: a power of two from 16 to 512 that keeps the scores in the cache."""
    batch, heads = call.q.shape[:2]
    row_bytes = batch * heads * call.kv_len * max(4, call.q.element_size())
    rows = max(1, BLOCK_BYTES // max(row_bytes, 1))
    return min(512, max(16, 1 << (rows.bit_length() - 1)))


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    rows = block_rows(call)
    recompute = call.needs_grad and not torch.compiler.is_compiling()
    runs = call.mask_runs()
    outs, lses = [], []
    for start in range(0, call.q_len, rows):
        stop = min(start + rows, call.q_len)
        keys = call.reach(start, stop, runs)
        if recompute:
            out, lse = checkpoint(  # type: ignore[misc]
                _attend,
                call,
                start,
                stop,
                keys,
                use_reentrant=False,
                preserve_rng_state=call.dropout_p > 0,
                determinism_check="none",
            )
        else:
            out, lse = _attend(call, start, stop, keys)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2) if call.need_lse else None


def _attend(
    call: Call, start: int, stop: int, keys: tuple[int, int]
) -> tuple[Tensor, Tensor | None]:
    return reference.attend(call.keys(*keys), start, stop)
