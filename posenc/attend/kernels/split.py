"""A bias that is a term of the query minus a term of the key: as one row of numbers for a block of
queries, or carried in extra columns of q and k."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.kernels.cost import negligible
from posenc.attend.problem import Call
from posenc.encoding.base import PositionEncoding
from posenc.numbers.precision import at_least_float32

ROWS, STEEP_ROWS = 512, 128
"""Queries that share a row of key terms, which count from its middle: fewer where the terms fall by
more than 64 on the way, as large numbers are coarse and small weights slow."""


def refuse(call: Call) -> str | None:
    if call.mask is None or not call.mask.causal:
        return "a term per key is the bias under a causal mask only"
    if 4 in call.encoding.places or terms(call) is None:
        return "it is no term of the query minus a term of the key"
    return None


def terms(call: Call) -> tuple[Tensor, Tensor] | None:
    return call.encoding.split_bias(
        call.q_positions, call.kv_positions, call.q_state, call.kv_state
    )


def refuse_rows(call: Call) -> str | None:
    """Why `run_rows` cannot compute a call that is_causal fits."""
    if call.q.device.type != "cpu" or call.needs_grad:
        return "CUDA's kernels would write the row out, and its gradient is not computed"
    if call.v.shape[-1] != call.q.shape[-1]:
        return "torch's kernel wants values of the width of queries"
    return None


def run_rows(call: Call) -> Tensor:
    """Causal attention over equal runs by torch's flash kernel: block by block, earlier keys and
    the block's own apart, since one row of bias serves all queries and is_causal does the rest.

    Earlier keys that no query of a block can give more than a negligible weight are left out: no
    score is further from zero than the norms of q and k allow, and a query sees its own key.
    """
    split_terms = terms(call)
    assert split_terms is not None
    row, key = (t if t.ndim == 3 else t[None] for t in split_terms)
    dtype = at_least_float32(call.q.dtype)
    batch, heads, q_len, width = call.q.shape
    group = heads // call.k.shape[1]
    q_size, k_size = (
        torch.linalg.vector_norm(t, dim=-1, dtype=dtype).amax(-1) for t in (call.q, call.k)
    )
    spread = 2 * abs(call.scale) * q_size * k_size.repeat_interleave(group, dim=1)
    least = (row - key).amin(-1) - spread + negligible(dtype)
    out = call.q.new_empty(batch, q_len, heads, width).transpose(1, 2)
    fall = float((key.amax(-1) - key.amin(-1)).amax()) / q_len
    rows = ROWS if fall * ROWS <= 64 else STEEP_ROWS
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        bias = row[..., (start + stop) // 2, None] - key[..., :stop]
        lost = row[..., start:stop].amax(-1, keepdim=True) - key[..., :start] < least[..., None]
        bias = bias.to(dtype).expand(batch, -1, -1).contiguous()
        bias[..., :start].masked_fill_(lost, -torch.inf)
        kept = torch.nonzero(~lost.flatten(0, 1).all(0))
        first = int(kept[0]) if len(kept) else start
        own, own_lse = _flash(call, start, stop, start, stop, bias)
        if first < start:
            past, past_lse = _flash(call, start, stop, first, start, bias)
            past_lse = past_lse.masked_fill(lost[..., first:].all(-1, keepdim=True), -torch.inf)
            own = own.lerp(past, (past_lse - own_lse).sigmoid()[..., None].to(own.dtype))
        out[:, :, start:stop] = own
    return out


def _flash(
    call: Call, start: int, stop: int, first: int, last: int, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries start .. stop over keys first .. last, each of which has its bias; causal where the
    two are the same."""
    mask = bias[:, :, None, first:last].expand(-1, -1, stop - start, -1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.q[:, :, start:stop], call.k[:, :, first:last], call.v[:, :, first:last], 0.0,
        start == first, attn_mask=mask, scale=call.scale,
    )  # fmt: skip


def fold(call: Call) -> Call:
    """The same attention without place 3: k carries its term, divided by the scale, against
    columns of ones in q; the query's term cancels in the softmax.

    One column in float32; in half types the term is split in two that are rounded to the dtype, as
    one would round it to whole numbers at a few hundred.
    """
    split_terms = terms(call)
    assert split_terms is not None
    column = -split_terms[1].to(torch.promote_types(split_terms[1].dtype, torch.float32))
    column = column if column.ndim == 3 else column[None]
    # Its middle at zero: half the size, so half the rounding error. A constant cancels.
    column = (column - (column.amin(-1, keepdim=True) + column.amax(-1, keepdim=True)) / 2) / (
        call.scale
    )
    batch, heads, q_len, width = call.q.shape
    half = call.q.element_size() == 2
    high = column.to(call.q.dtype)
    parts = [high, (column - high.to(column.dtype)).to(call.q.dtype)] if half else [high]
    columns = torch.stack(parts, -1).expand(batch, -1, -1, -1)
    k = call.k.repeat_interleave(heads // call.k.shape[1], dim=1)
    v = call.v.repeat_interleave(heads // call.v.shape[1], dim=1)
    ones = call.q.new_ones(batch, heads, q_len, len(parts))
    # Kernels like widths that are a multiple of 8.
    room = -(width + len(parts)) % 8
    return replace(
        call,
        q=F.pad(torch.cat([call.q, ones], -1), (0, room)),
        k=F.pad(torch.cat([k, columns], -1), (0, room)),
        v=v,
        encoding=PositionEncoding(),
    )
