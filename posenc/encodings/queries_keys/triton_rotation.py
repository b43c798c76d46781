"""Rotate channel pairs in one pass on CUDA: read x once, write the result once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM_PAIRS = 2048
"""Maximum pairs of channels that one program rotates. It takes as many heads of one token as have
that many pairs together. Chosen, not derived."""


def num_warps_for(pairs: int) -> int:
    """Return the number of warps, 1 to 4, of a program that rotates `pairs` pairs. Each of a warp's
    32 threads gets at least 8 pairs, so that 16-bit channels too are read 16 bytes at a time."""
    return max(1, min(4, pairs // 256))


@triton.jit
def _rotate_heads(
    x,
    out,
    c,
    s,
    row,
    length,
    head,
    heads,
    x_batch,
    x_head,
    x_token,
    x_channel,
    out_batch,
    out_head,
    out_token,
    out_channel,
    INTERLEAVED: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate a few heads of one token by cosines c and sines s, (1, PAIRS), and copy the channels
    that do not rotate, from x to out.

    row: index of the token, counted through the whole batch. head: indices of the heads, (HEADS,);
    those from `heads` on, the number of heads, do not exist. x_batch to out_channel: strides.
    NUM_PAIRS: pairs that rotate. PAIRS, REST: NUM_PAIRS and the number of other channels, rounded
    up to a power of two.
    """
    batch = row // length
    token = row % length
    source = x + batch * x_batch + token * x_token + head.to(tl.int64)[:, None] * x_head
    target = out + batch * out_batch + token * out_token + head.to(tl.int64)[:, None] * out_head
    shown = (head < heads)[:, None]
    dtype = out.dtype.element_ty
    if INTERLEAVED:  # neighbours are read together, as wide loads, and then taken apart
        channel = tl.arange(0, 2 * PAIRS)[None, :]
        inside = shown & (channel < 2 * NUM_PAIRS)
        both = tl.load(source + channel * x_channel, mask=inside, other=0.0).to(c.dtype)
        a, b = tl.split(tl.reshape(both, (both.shape[0], PAIRS, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (both.shape[0], 2 * PAIRS))
        tl.store(target + channel * out_channel, turned.to(dtype), mask=inside)
    else:
        first = tl.arange(0, PAIRS)[None, :]
        second = first + NUM_PAIRS
        inside = shown & (first < NUM_PAIRS)
        a = tl.load(source + first * x_channel, mask=inside, other=0.0).to(c.dtype)
        b = tl.load(source + second * x_channel, mask=inside, other=0.0).to(c.dtype)
        tl.store(target + first * out_channel, (a * c - b * s).to(dtype), mask=inside)
        tl.store(target + second * out_channel, (b * c + a * s).to(dtype), mask=inside)
    if REST:
        channel = 2 * NUM_PAIRS + tl.arange(0, REST)[None, :]
        inside = shown & (channel < HEAD_DIM)
        kept = tl.load(source + channel * x_channel, mask=inside, other=0.0)
        tl.store(target + channel * out_channel, kept, mask=inside)


@triton.jit
def _rotation_kernel(
    q,
    q_out,
    k,
    k_out,
    cos,
    sin,
    length,
    q_heads,
    q_blocks,
    k_heads,
    q_batch,
    q_head,
    q_token,
    q_channel,
    q_out_batch,
    q_out_head,
    q_out_token,
    q_out_channel,
    k_batch,
    k_head,
    k_token,
    k_channel,
    k_out_batch,
    k_out_head,
    k_out_token,
    k_out_channel,
    table_batch,
    table_token,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST: tl.constexpr,
):
    """Rotate HEADS heads of one token from q to q_out if the program's second index is below
    q_blocks, otherwise from k to k_out.

    cos, sin: tables of NUM_PAIRS columns. q_blocks: number of groups of HEADS heads in q. q_batch
    to table_token: strides. The constants are those of `_rotate_heads`.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, PAIRS)
    table = row // length * table_batch + row % length * table_token + pair
    c = tl.load(cos + table, mask=pair < NUM_PAIRS, other=0.0)[None, :]
    s = tl.load(sin + table, mask=pair < NUM_PAIRS, other=0.0)[None, :]
    if block < q_blocks:
        _rotate_heads(
            q,
            q_out,
            c,
            s,
            row,
            length,
            block * HEADS + tl.arange(0, HEADS),
            q_heads,
            q_batch,
            q_head,
            q_token,
            q_channel,
            q_out_batch,
            q_out_head,
            q_out_token,
            q_out_channel,
            INTERLEAVED,
            NUM_PAIRS,
            PAIRS,
            HEAD_DIM,
            REST,
        )
    else:
        _rotate_heads(
            k,
            k_out,
            c,
            s,
            row,
            length,
            (block - q_blocks) * HEADS + tl.arange(0, HEADS),
            k_heads,
            k_batch,
            k_head,
            k_token,
            k_channel,
            k_out_batch,
            k_out_head,
            k_out_token,
            k_out_channel,
            INTERLEAVED,
            NUM_PAIRS,
            PAIRS,
            HEAD_DIM,
            REST,
        )


def rotate(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Return one or two tensors (batch, heads, len, head_dim) with their first 2 * pairs channels
    rotated, by one launch of the kernel; the other channels are unchanged. Any strides are allowed.
    Two tensors may differ in their number of heads only.

    cos and sin are (1, len, pairs) or (batch, 1, len, pairs). The rotation is computed in their
    dtype and rounded once.

    Raises: RuntimeError if cos and sin do not fit, or if not all tensors are on one device.
    """
    (batch, _, length, head_dim), pairs = xs[0].shape, cos.shape[-1]
    devices = {t.device for t in (*xs, cos, sin)}
    if len(devices) > 1:  # the kernel would read another device's memory
        names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"rotate: q, k, cos and sin must be on one device, got {names}.")
    # expand raises for other sizes, at which the kernel would read out of bounds.
    cos, sin = (t.contiguous().expand(batch, 1, length, pairs) for t in (cos, sin))
    if 2 * pairs > head_dim:
        raise RuntimeError(f"rotate: {pairs} pairs of channels need more than {head_dim} channels.")
    return tuple(torch.ops.posenc.rotate.default(xs, cos, sin, interleaved))


def launch(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    """Return the tensors xs rotated by one launch of the kernel. cos and sin are (batch, 1, len,
    pairs), contiguous along the last axis."""
    outs = [torch.empty_like(x) for x in xs]  # all of each is written by the kernel
    (batch, _, length, head_dim), num_pairs = xs[0].shape, cos.shape[-1]
    num_kept_channels = head_dim - 2 * num_pairs
    block_pairs = triton.next_power_of_2(num_pairs)
    most_heads = max(x.shape[1] for x in xs)
    block_heads = min(triton.next_power_of_2(most_heads), max(1, PROGRAM_PAIRS // block_pairs))
    q = xs[0]
    q_out = outs[0]
    k = xs[-1]
    k_out = outs[-1]
    blocks_per_tensor = [triton.cdiv(x.shape[1], block_heads) for x in xs]
    if not batch * length * sum(blocks_per_tensor):
        return outs
    kernel: Any = _rotation_kernel  # without triton, a type checker sees a plain function
    with torch.cuda.device_of(q):  # triton launches on the current device
        kernel[(batch * length, sum(blocks_per_tensor))](
            q,
            q_out,
            k,
            k_out,
            cos,
            sin,
            length,
            q.shape[1],
            blocks_per_tensor[0],
            k.shape[1],
            *q.stride(),
            *q_out.stride(),
            *k.stride(),
            *k_out.stride(),
            cos.stride(0),
            cos.stride(2),
            INTERLEAVED=interleaved,
            HEADS=block_heads,
            NUM_PAIRS=num_pairs,
            PAIRS=block_pairs,
            HEAD_DIM=head_dim,
            REST=triton.next_power_of_2(num_kept_channels) if num_kept_channels else 0,
            num_warps=num_warps_for(block_heads * block_pairs),
            enable_fp_fusion=True,  # Triton's default changes with its version
        )
    return outs


# An operator of torch, because tracers and dispatch modes do not see a launch by Triton. Not
# torch.library.custom_op, whose checks take longer than the rotation of a few tokens.
torch.library.define(
    "posenc::rotate", "(Tensor[] xs, Tensor cos, Tensor sin, bool interleaved) -> Tensor[]"
)
torch.library.impl("posenc::rotate", "CUDA", launch)
torch.library.register_fake("posenc::rotate", lambda xs, *_: [torch.empty_like(x) for x in xs])
