"""Add up the gradients of scores along diagonals of blocks, in one pass, on CUDA.

The formulas, and what an offset is, are at the head of flex_bias_gradient.py, which computes the
same by plain operations of torch. One program adds up one of NUM_PARTS parts of the blocks of one
head and one offset, for all rows of the batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK_BYTES = 64 * 2**10
"""Maximum bytes of the queries, keys, values and gradients of a block."""
MAX_SHARED_BYTES = 96 * 2**10
"""Maximum bytes of shared memory for queries, keys, values and gradients. If they are small,
several blocks fit, so that the next one loads during the computation of this one."""
NUM_PARTS = 4
"""Number of programs that share the blocks of one offset."""
NUM_WARPS = 8
"""Number of warps of a program; chosen, not derived."""


def block_size(q: Tensor, v: Tensor) -> int:
    """Return the number of queries, and of keys, of a block: the first of 64, 32 and 16 whose
    tensors take at most MAX_BLOCK_BYTES, or 16, the smallest that the kernel can multiply."""
    size = 64
    while size > 16 and _block_bytes(q, v, size) > MAX_BLOCK_BYTES:
        size //= 2
    return size


def _block_bytes(q: Tensor, v: Tensor, size: int) -> int:
    """Return the bytes of q, k, v and the output's gradient of a block of `size` queries and `size`
    keys."""
    return 2 * size * (_padded_width(q) + _padded_width(v)) * q.element_size()


def _padded_width(t: Tensor) -> int:
    """Return the width to which the kernel pads t: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(t.shape[-1]))


@triton.jit
def _sum_diagonals_kernel(
    q,
    k,
    v,
    grad,
    lse,
    delta,
    row,
    out,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    q_channel_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    k_channel_stride,
    v_batch_stride,
    v_head_stride,
    v_token_stride,
    v_channel_stride,
    grad_batch_stride,
    grad_head_stride,
    grad_token_stride,
    grad_channel_stride,
    batch,
    num_heads,
    q_len,
    kv_len,
    row_len,
    highest_offset,
    least_distance,
    greatest_distance,
    scale,
    HEADS_PER_KV_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    PADDED_V_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write to `out` the sum of the gradients of the scores of one part of the blocks of one head
    and one offset: (BLOCK, BLOCK). The ids of the program choose part, offset and head.

    q_batch_stride, ...: elements from one row of the batch to the next, and so on.
    HEADS_PER_KV_HEAD: query heads that share a head of k and v. WIDTH, V_WIDTH: channels of q and
    of v, padded to PADDED_WIDTH and PADDED_V_WIDTH.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634  # type: ignore[assignment]
    part = tl.program_id(0)
    offset_index = tl.program_id(1)
    head = tl.program_id(2)
    offset = highest_offset - offset_index
    index_in_block = tl.arange(0, BLOCK)
    # All blocks of one offset have the same distances, and so the same bias. It is multiplied by
    # log2(e), as scores are below, because exp2 is the faster instruction: exp(x) = exp2(x
    # log2(e)).
    distance = offset * BLOCK + index_in_block[:, None] - index_in_block[None, :]
    row_index = q_len - 1 - distance
    is_visible = (
        (distance >= least_distance)
        & (distance <= greatest_distance)
        & (row_index >= 0)
        & (row_index < row_len)
    )
    bias = tl.load(row + head.to(tl.int64) * row_len + row_index, mask=is_visible, other=0.0)
    bias = tl.where(is_visible, bias, float("-inf")) * LOG2_E

    # This program's share of the blocks of queries that have a block of keys `offset` before them.
    first_block = tl.maximum(offset, 0)
    stop_block = tl.minimum(tl.cdiv(q_len, BLOCK), tl.cdiv(kv_len, BLOCK) + offset)
    blocks_per_part = tl.cdiv(tl.maximum(stop_block - first_block, 0), NUM_PARTS)
    part_begin = first_block + part * blocks_per_part
    part_end = tl.minimum(part_begin + blocks_per_part, stop_block)
    channel = tl.arange(0, PADDED_WIDTH)
    v_channel = tl.arange(0, PADDED_V_WIDTH)
    block_sum = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    head64 = head.to(tl.int64)  # a tensor may have more than 2^31 elements
    for b in range(batch):
        batch64 = tl.full((), 0, tl.int64) + b
        q_start = q + batch64 * q_batch_stride + head64 * q_head_stride
        k_start = k + batch64 * k_batch_stride + (head64 // HEADS_PER_KV_HEAD) * k_head_stride
        v_start = v + batch64 * v_batch_stride + (head64 // HEADS_PER_KV_HEAD) * v_head_stride
        grad_start = grad + batch64 * grad_batch_stride + head64 * grad_head_stride
        row_start = (batch64 * num_heads + head64) * q_len
        for block in range(part_begin, part_end):
            q_index = block * BLOCK + index_in_block
            k_index = (block - offset) * BLOCK + index_in_block
            is_query = q_index < q_len
            is_key = k_index < kv_len
            wide_q_index = q_index.to(tl.int64)[:, None]
            wide_k_index = k_index.to(tl.int64)[:, None]
            is_q_channel = channel[None, :] < WIDTH
            is_v_channel = v_channel[None, :] < V_WIDTH
            block_q = tl.load(
                q_start + wide_q_index * q_token_stride + channel[None, :] * q_channel_stride,
                mask=is_query[:, None] & is_q_channel,
                other=0.0,
            )
            block_k = tl.load(
                k_start + wide_k_index * k_token_stride + channel[None, :] * k_channel_stride,
                mask=is_key[:, None] & is_q_channel,
                other=0.0,
            )
            block_grad = tl.load(
                grad_start
                + wide_q_index * grad_token_stride
                + v_channel[None, :] * grad_channel_stride,
                mask=is_query[:, None] & is_v_channel,
                other=0.0,
            )
            block_v = tl.load(
                v_start + wide_k_index * v_token_stride + v_channel[None, :] * v_channel_stride,
                mask=is_key[:, None] & is_v_channel,
                other=0.0,
            )
            # Padded queries have weights exp(-inf) = 0.
            block_lse = tl.load(lse + row_start + q_index, mask=is_query, other=float("inf"))
            block_delta = tl.load(delta + row_start + q_index, mask=is_query, other=0.0)
            scores = (
                tl.dot(block_q, tl.trans(block_k), input_precision=PRECISION) * (scale * LOG2_E)
                + bias
            )
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            weights = tl.math.exp2(scores - (block_lse * LOG2_E)[:, None])
            d_weights = tl.dot(block_grad, tl.trans(block_v), input_precision=PRECISION)
            block_sum += weights * (d_weights - block_delta[:, None])
    out_start = (
        ((offset_index * NUM_PARTS + part).to(tl.int64) * num_heads + head64) * BLOCK * BLOCK
    )
    tl.store(out + out_start + index_in_block[:, None] * BLOCK + index_in_block[None, :], block_sum)


def diagonal_block_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    row: Tensor,
    scale: float,
    visible_distances: tuple[int, int],
    block_offsets: range,
) -> Tensor:
    """Return, for each of the offsets in falling order, the sum of the gradients of the scores of
    all blocks with this offset: (len(block_offsets), num_heads, size, size), where `block_size`
    returns the size. The offset of a block is the number of its block of queries minus that of its
    block of keys.

    q, grad (batch, num_heads, q_len, ...), k, v (batch, num_kv_heads, kv_len, ...), all of one
    dtype; lse, delta (batch, num_heads, q_len) and row (num_heads, q_len + kv_len - 1) in float32,
    contiguous. visible_distances: the least and the greatest distance, index of the query minus
    index of the key, at which a key is visible.
    """
    batch, num_heads, q_len, width = q.shape
    size = block_size(q, v)
    out = row.new_empty(len(block_offsets), NUM_PARTS, num_heads, size, size)
    least_distance, greatest_distance = (
        max(-(2**31), min(distance, 2**31 - 1)) for distance in visible_distances
    )  # int32
    kernel: Any = _sum_diagonals_kernel  # without triton, a type checker sees a plain function
    with torch.cuda.device_of(q):  # triton launches on the current device
        kernel[(NUM_PARTS, len(block_offsets), num_heads)](
            q,
            k,
            v,
            grad,
            lse,
            delta,
            row,
            out,
            *q.stride(),
            *k.stride(),
            *v.stride(),
            *grad.stride(),
            batch,
            num_heads,
            q_len,
            k.shape[2],
            row.shape[1],
            block_offsets[0],  # highest_offset
            least_distance,
            greatest_distance,
            scale,
            HEADS_PER_KV_HEAD=num_heads // k.shape[1],
            WIDTH=width,
            V_WIDTH=v.shape[-1],
            PADDED_WIDTH=_padded_width(q),
            PADDED_V_WIDTH=_padded_width(v),
            BLOCK=size,
            NUM_PARTS=NUM_PARTS,
            PRECISION="ieee",
            num_warps=NUM_WARPS,
            # Blocks in shared memory at once: as many as fit, at most 3 (chosen).
            num_stages=max(1, min(3, MAX_SHARED_BYTES // _block_bytes(q, v, size))),
        )
    return out.sum(1)
