"""Rotate channel pairs in one pass on CUDA: read x once, write the result once."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PAIRS_PER_PROGRAM = 2048
"""Maximum pairs of channels that one program rotates. It takes as many heads of one token as have
that many pairs together. Chosen, not derived."""


def num_warps_for(num_pairs: int) -> int:
    """Return the number of warps, 1 to 4, of a program that rotates `num_pairs` pairs, a power of
    two. From 256 pairs on, each of a warp's 32 threads gets at least 8 pairs, so that 16-bit
    channels too are read 16 bytes at a time."""
    assert num_pairs & (num_pairs - 1) == 0, "Triton takes a power of two of warps"
    return max(1, min(4, num_pairs // 256))


@triton.jit
def _rotate_heads(
    x,
    out,
    c,
    s,
    row,
    length,
    head_indices,
    num_heads,
    x_batch_stride,
    x_head_stride,
    x_token_stride,
    x_channel_stride,
    out_batch_stride,
    out_head_stride,
    out_token_stride,
    out_channel_stride,
    INTERLEAVED: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Rotate a few heads of one token by cosines c and sines s, (1, PADDED_PAIRS), and copy the
    channels that do not rotate, from x to out.

    row: index of the token, counted through the whole batch. head_indices: (BLOCK_HEADS,); heads
    from `num_heads` on do not exist. NUM_PAIRS: pairs that rotate. PADDED_PAIRS, PADDED_REST:
    NUM_PAIRS and the number of other channels, rounded up to a power of two.
    """
    batch = row // length
    token = row % length
    source_pointers = (
        x
        + batch * x_batch_stride
        + token * x_token_stride
        + head_indices.to(tl.int64)[:, None] * x_head_stride
    )
    target_pointers = (
        out
        + batch * out_batch_stride
        + token * out_token_stride
        + head_indices.to(tl.int64)[:, None] * out_head_stride
    )
    head_exists = (head_indices < num_heads)[:, None]
    dtype = out.dtype.element_ty
    if INTERLEAVED:  # neighbours are read together, as wide loads, and then taken apart
        channel_indices = tl.arange(0, 2 * PADDED_PAIRS)[None, :]
        is_inside = head_exists & (channel_indices < 2 * NUM_PAIRS)
        channels_of_pairs = tl.load(
            source_pointers + channel_indices * x_channel_stride, mask=is_inside, other=0.0
        ).to(c.dtype)
        a, b = tl.split(
            tl.reshape(channels_of_pairs, (channels_of_pairs.shape[0], PADDED_PAIRS, 2))
        )
        rotated = tl.reshape(
            tl.join(a * c - b * s, b * c + a * s), (channels_of_pairs.shape[0], 2 * PADDED_PAIRS)
        )
        tl.store(
            target_pointers + channel_indices * out_channel_stride,
            rotated.to(dtype),
            mask=is_inside,
        )
    else:
        first_channel = tl.arange(0, PADDED_PAIRS)[None, :]
        second_channel = first_channel + NUM_PAIRS
        is_inside = head_exists & (first_channel < NUM_PAIRS)
        a = tl.load(
            source_pointers + first_channel * x_channel_stride, mask=is_inside, other=0.0
        ).to(c.dtype)
        b = tl.load(
            source_pointers + second_channel * x_channel_stride, mask=is_inside, other=0.0
        ).to(c.dtype)
        tl.store(
            target_pointers + first_channel * out_channel_stride,
            (a * c - b * s).to(dtype),
            mask=is_inside,
        )
        tl.store(
            target_pointers + second_channel * out_channel_stride,
            (b * c + a * s).to(dtype),
            mask=is_inside,
        )
    if PADDED_REST:
        channel_indices = 2 * NUM_PAIRS + tl.arange(0, PADDED_REST)[None, :]
        is_inside = head_exists & (channel_indices < HEAD_DIM)
        unrotated = tl.load(
            source_pointers + channel_indices * x_channel_stride, mask=is_inside, other=0.0
        )
        tl.store(target_pointers + channel_indices * out_channel_stride, unrotated, mask=is_inside)


@triton.jit
def _rotation_kernel(
    q,
    q_out,
    k,
    k_out,
    cos,
    sin,
    length,
    num_q_heads,
    num_q_blocks,
    num_k_heads,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    q_channel_stride,
    q_out_batch_stride,
    q_out_head_stride,
    q_out_token_stride,
    q_out_channel_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    k_channel_stride,
    k_out_batch_stride,
    k_out_head_stride,
    k_out_token_stride,
    k_out_channel_stride,
    table_batch_stride,
    table_token_stride,
    INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    PADDED_PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Rotate BLOCK_HEADS heads of one token from q to q_out if the program's second index is below
    num_q_blocks, otherwise from k to k_out.

    cos, sin: tables of NUM_PAIRS columns. num_q_blocks: number of groups of BLOCK_HEADS heads in
    q. The constants are those of `_rotate_heads`.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair_indices = tl.arange(0, PADDED_PAIRS)
    table_offsets = (
        row // length * table_batch_stride + row % length * table_token_stride + pair_indices
    )
    c = tl.load(cos + table_offsets, mask=pair_indices < NUM_PAIRS, other=0.0)[None, :]
    s = tl.load(sin + table_offsets, mask=pair_indices < NUM_PAIRS, other=0.0)[None, :]
    if block < num_q_blocks:
        _rotate_heads(
            q,
            q_out,
            c,
            s,
            row,
            length,
            block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS),
            num_q_heads,
            q_batch_stride,
            q_head_stride,
            q_token_stride,
            q_channel_stride,
            q_out_batch_stride,
            q_out_head_stride,
            q_out_token_stride,
            q_out_channel_stride,
            INTERLEAVED,
            NUM_PAIRS,
            PADDED_PAIRS,
            HEAD_DIM,
            PADDED_REST,
        )
    else:
        _rotate_heads(
            k,
            k_out,
            c,
            s,
            row,
            length,
            (block - num_q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS),
            num_k_heads,
            k_batch_stride,
            k_head_stride,
            k_token_stride,
            k_channel_stride,
            k_out_batch_stride,
            k_out_head_stride,
            k_out_token_stride,
            k_out_channel_stride,
            INTERLEAVED,
            NUM_PAIRS,
            PADDED_PAIRS,
            HEAD_DIM,
            PADDED_REST,
        )


def rotate_by_kernel(
    xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, ...]:
    """Return one or two tensors (batch, heads, len, head_dim) with their first 2 * pairs channels
    rotated, by one launch of the kernel; the other channels are unchanged. Any strides are allowed.
    Two tensors may differ in their number of heads only.

    cos and sin are (1, len, pairs) or (batch, 1, len, pairs). The rotation is computed in their
    dtype and rounded once.

    Raises: RuntimeError if cos and sin do not fit, or if not all tensors are on one device.
    """
    (batch, _, length, head_dim), num_pairs = xs[0].shape, cos.shape[-1]
    devices = {t.device for t in (*xs, cos, sin)}
    if len(devices) > 1:  # the kernel would read another device's memory
        device_names = ", ".join(sorted(map(str, devices)))
        raise RuntimeError(f"rotate: q, k, cos and sin must be on one device, got {device_names}.")
    # expand raises for other sizes, at which the kernel would read out of bounds.
    cos, sin = (t.contiguous().expand(batch, 1, length, num_pairs) for t in (cos, sin))
    if 2 * num_pairs > head_dim:
        raise RuntimeError(
            f"rotate: {num_pairs} pairs of channels need more than {head_dim} channels."
        )
    return tuple(torch.ops.posenc.rotate.default(xs, cos, sin, interleaved))


def launch(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    """Return the tensors xs rotated by one launch of the kernel. cos and sin are (batch, 1, len,
    pairs), contiguous along the last axis."""
    outs = [torch.empty_like(x) for x in xs]  # all of each is written by the kernel
    (batch, _, length, head_dim), num_pairs = xs[0].shape, cos.shape[-1]
    num_kept_channels = head_dim - 2 * num_pairs
    padded_pairs = triton.next_power_of_2(num_pairs)
    most_heads = max(x.shape[1] for x in xs)
    block_heads = min(triton.next_power_of_2(most_heads), max(1, PAIRS_PER_PROGRAM // padded_pairs))
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
            BLOCK_HEADS=block_heads,
            NUM_PAIRS=num_pairs,
            PADDED_PAIRS=padded_pairs,
            HEAD_DIM=head_dim,
            PADDED_REST=triton.next_power_of_2(num_kept_channels) if num_kept_channels else 0,
            num_warps=num_warps_for(block_heads * padded_pairs),
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
