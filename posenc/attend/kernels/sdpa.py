"""torch's own kernels: where nothing needs to see the scores, or the bias can be handed to them
without writing it out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.kernels import split, toeplitz, toeplitz_forward, toeplitz_gradients
from posenc.attend.kernels.cost import Cost
from posenc.attend.problem import Call

MASKED_ROWS = 256
"""Queries that share one mask written out."""


def refuse(call: Call) -> str | None:
    if call.dropout_p:
        return "dropout is honoured by reference and blockwise alone"
    why_not = toeplitz.refuse(call)
    if why_not is None:
        return None
    if call.need_lse:
        return f"the log-sum-exp comes from the query blocks, and {why_not}"
    if call.changes_scores and (why := split.refuse(call)):
        return f"{why_not}; {why}"
    return None


def cost(call: Call) -> Cost:
    size = call.q.element_size()
    batch, heads = call.q.shape[:2]
    if takes_blocks(call):
        grouped = call.k.shape[1] != heads
        at_once = heads if grouped else toeplitz_forward.heads_at_once(heads, call.q_len)
        rows = at_once * min(call.q_len, toeplitz_forward.GROUP)
        block = 2 * batch * rows * call.q.shape[-1] * size
        backward = 3 * toeplitz_gradients.BYTES + 4 * call.k.numel() if call.needs_grad else 0
        return Cost(_visible_time(call), 4 * heads * (call.q_len + call.kv_len) + block + backward)
    dense_mask = 0
    if call.mask is not None and not is_plain_causal(call):  # torch makes numbers of it
        rows = call.q_len if _mask_in_one(call) else min(call.q_len, MASKED_ROWS)
        dense_mask = rows * call.kv_len * (1 + size)
    folded = 0
    if call.changes_scores:
        folded = sum(t.numel() + t.numel() // t.shape[-1] * 8 for t in (call.q, call.k, call.v))
    return Cost("O(q_len * kv_len)", dense_mask + folded * size)


def _visible_time(call: Call) -> str:
    mask = call.mask
    if mask is not None and mask.window is not None:
        return f"O(q_len * {min(mask.window, call.kv_len)})"
    return "O(q_len * kv_len)"


def takes_blocks(call: Call) -> bool:
    """Whether the call goes through query blocks, and not to the kernel in one piece."""
    needed = call.changes_scores or call.need_lse or _is_window(call)
    return needed and toeplitz.refuse(call) is None


def _is_window(call: Call) -> bool:
    return call.mask is not None and call.mask.window is not None


def run(call: Call) -> tuple[Tensor, Tensor | None]:
    if takes_blocks(call):
        return toeplitz.run(call)
    causal = is_plain_causal(call)
    if call.changes_scores:
        if causal and split.refuse_rows(call) is None:
            return split.run_rows(call), None
        call = split.fold(call)
    if causal or call.mask is None or _mask_in_one(call):
        return _kernel(call, 0, call.q_len, causal=causal), None
    starts = range(0, call.q_len, MASKED_ROWS)
    blocks = [(start, min(start + MASKED_ROWS, call.q_len)) for start in starts]
    outs = [_kernel(call.keys(*call.reach(*block)), *block) for block in blocks]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2), None


def _mask_in_one(call: Call) -> bool:
    """Whether the mask is written out for all queries: the backward pass keeps it anyhow, and
    a compiled graph is for any length."""
    return call.needs_grad or torch.compiler.is_compiling()


def _kernel(call: Call, start: int, stop: int, *, causal: bool = False) -> Tensor:
    """torch's kernel for queries start .. stop."""
    visible = None if causal else call.visible(start, stop)
    if visible is not None:
        # Every axis in full, else torch falls back to its dense path.
        visible = visible.expand(*visible.shape[:-2], stop - start, call.kv_len)
    q, v = call.q[:, :, start:stop], call.v
    width, v_dim = q.shape[-1], v.shape[-1]
    v = F.pad(v, (0, width - v_dim)) if v_dim < width else v
    out = F.scaled_dot_product_attention(
        q, call.k, v, attn_mask=visible, is_causal=causal, scale=call.scale,
        enable_gqa=q.shape[1] != call.k.shape[1],
    )  # fmt: skip
    if visible is not None and not call.every_row_sees_a_key:
        out = out.masked_fill(~visible.any(-1, keepdim=True), 0)
    return out[..., :v_dim]


def is_plain_causal(call: Call) -> bool:
    """Whether the mask is what is_causal means: queries and keys are the same run of positions."""
    mask = call.mask
    if mask is None or not (mask.exact and mask.causal and mask.window is None):
        return False
    runs = call.mask_runs
    return call.q_len == call.kv_len and runs is not None and runs[0] == runs[1]
