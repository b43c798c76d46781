"""A bias that is a term of the query minus a term of the key, carried in extra columns of q and k:
any kernel, any positions, any mask that looks at no later position."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.call import Call
from posenc.encoding import PositionEncoding


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
