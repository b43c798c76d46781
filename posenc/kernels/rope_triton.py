"""Rotation of channel pairs in one pass on CUDA: reads x once, writes the result once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_NUMBERS = 2048
"""Pairs that one program rotates: heads are taken together until they fill it."""


@triton.jit
def _kernel(
    x, out, cos, sin,
    heads, length, pairs, head_dim,
    x_batch, x_head, x_token, x_channel,
    out_batch, out_head, out_token, out_channel,
    table_batch, table_token,
    INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    seen = pair < pairs
    table = batch * table_batch + token * table_token + pair
    c = tl.load(cos + table, mask=seen, other=0.0)[None, :]
    s = tl.load(sin + table, mask=seen, other=0.0)[None, :]
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + pairs
    source = x + batch * x_batch + token * x_token + head.to(tl.int64)[:, None] * x_head
    target = out + batch * out_batch + token * out_token + head.to(tl.int64)[:, None] * out_head
    inside = (head < heads)[:, None] & seen[None, :]
    a = tl.load(source + first[None, :] * x_channel, mask=inside, other=0.0).to(c.dtype)
    b = tl.load(source + second[None, :] * x_channel, mask=inside, other=0.0).to(c.dtype)
    dtype = out.dtype.element_ty
    tl.store(target + first[None, :] * out_channel, (a * c - b * s).to(dtype), mask=inside)
    tl.store(target + second[None, :] * out_channel, (b * c + a * s).to(dtype), mask=inside)
    if REST:
        channel = 2 * pairs + tl.arange(0, REST)
        inside = (head < heads)[:, None] & (channel < head_dim)[None, :]
        kept = tl.load(source + channel[None, :] * x_channel, mask=inside, other=0.0)
        tl.store(target + channel[None, :] * out_channel, kept, mask=inside)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, in_place: bool = False
) -> Tensor:
    """The first 2 * pairs channels of x (batch, heads, len, head_dim), of any strides, rotated; the
    rest passes through.

    cos and sin are (1, len, pairs) or (batch, 1, len, pairs), float32 or float64. Computed in their
    dtype, rounded once.
    """
    batch, heads, length, head_dim = x.shape
    pairs = cos.shape[-1]
    out = x if in_place else torch.empty_like(x)
    if not x.numel():
        return out
    cos, sin = cos.contiguous(), sin.contiguous()
    # (batch, len): tables of one row are shared by the whole batch.
    table_batch = cos.stride(0) if cos.ndim == 4 and cos.shape[0] > 1 else 0
    rest = 0 if in_place else head_dim - 2 * pairs
    block_pairs = triton.next_power_of_2(pairs)
    block_heads = min(triton.next_power_of_2(heads), max(1, PROGRAM_NUMBERS // block_pairs))
    kernel: Any = _kernel  # a plain function to a type checker where triton is not installed
    kernel[(batch * length, triton.cdiv(heads, block_heads))](
        x, out, cos, sin, heads, length, pairs, head_dim, *x.stride(), *out.stride(),
        table_batch, pairs, INTERLEAVED=interleaved, HEADS=block_heads, PAIRS=block_pairs,
        REST=triton.next_power_of_2(rest) if rest else 0,
    )  # fmt: skip
    return out
