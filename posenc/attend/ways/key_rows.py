"""Attend with a bias that is a number of the query minus a number of the key: by one row of bias
for each block of queries.

    score[i, j] += query_bias[i] - key_bias[j]    for query i and key j

With a causal mask query_bias[i] cancels in the softmax, so a block of queries needs only one row of
bias, which torch's flash kernel reads as a mask with stride 0 along the queries. The bias is
relative to the middle of the block, so it is small near the block and as precise at key 100,000 as
at key 100. Blocks are so short that this holds for all their queries.

query_bias is (batch or 1, num_heads, q_len), key_bias (batch or 1, num_heads, kv_len), both in
float64.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways import flash
from posenc.attend.ways.second_derivatives import dense_gradients
from posenc.attend.ways.strips_backward import sum_head_groups
from posenc.encodings.numerics.precision import at_least_float32, without_autocast
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.numerics.torch_modes import is_readable

MAX_BLOCK_ROWS = 512
"""Maximum number of queries in a block, all of which read one row of bias."""
MAX_CHANGE_BY_BLOCK_SIZE = {MAX_BLOCK_ROWS: 64, 128: 128, 32: 128}
"""Maximum change of query_bias[i] within a block, by the number of queries in the block.

A larger change would make the bias coarse, because float32 rounds 64 by up to 4e-6. It would also
give tiny weights, which are slow, and more of them in larger blocks. `_block_size` takes the first
size, the largest, whose maximum holds. If none does, this form cannot run."""
MAX_MAGNITUDES = {torch.float32: 2.0**28, torch.float64: 2.0**12}
"""Maximum absolute value of query_bias and key_bias, by the dtype of the scores. float64 then
rounds their difference by less than 1e-7 for float32, and 1e-12 for float64."""


def run(problem: Problem) -> tuple[Tensor, None]:
    """Attend by blocks of queries, and return the output. The log-sum-exp is None: choose.py lets
    only problems come here that do not need it, and whose term and mask allow this way."""
    query_bias, key_bias = _query_and_key_bias(problem)
    dtype = problem.product_dtype
    q, k, v = (t.to(dtype) for t in (problem.q, problem.k, problem.v))
    if torch.is_grad_enabled() and (query_bias.requires_grad or key_bias.requires_grad):
        # The gradients of key_bias cancel in their sum over keys. In 16 bits the rounding of
        # the output would be all that is left of them.
        q, k, v = (t.to(at_least_float32(dtype)) for t in (q, k, v))
    with without_autocast(q.device):
        out = _KeyRowsAttention.apply(q, k, v, query_bias, key_bias, replace(problem, term=None))
    return out, None  # type: ignore[return-value]


def why_cannot_run(problem: Problem) -> str | None:
    """Return why one row of bias is not exact enough for a block of queries: query_bias or
    key_bias, whose difference is the bias, are too large, or query_bias changes too much from query
    to query. None if it is."""
    query_bias, key_bias = (t.detach() for t in _query_and_key_bias(problem))
    largest_magnitude = float(torch.maximum(query_bias.abs().amax(), key_bias.abs().amax()))
    if not largest_magnitude <= MAX_MAGNITUDES[at_least_float32(problem.q.dtype)]:
        return "its positions or gates span too much for one row of bias per block"
    if _block_size(query_bias) is None:
        return "the bias changes too much between neighbouring queries for one row per block"
    return None


def _query_and_key_bias(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return the two parts of the bias, bias[i, j] = query_bias[i] - key_bias[j]: (batch or 1,
    num_heads, q_len) and (batch or 1, num_heads, kv_len)."""
    assert problem.term is not None and problem.term.query_and_key_bias is not None
    query_bias, key_bias = problem.term.query_and_key_bias()
    return _add_batch_axis(query_bias), _add_batch_axis(key_bias)


def _add_batch_axis(t: Tensor) -> Tensor:
    """Return t of shape (num_heads, len) with a batch axis of 1 in front; unchanged if it has
    one."""
    return t if t.ndim == 3 else t[None]


def _block_size(query_bias: Tensor) -> int | None:
    """Return the largest number of queries per block for which query_bias, (batch or 1, num_heads,
    q_len), changes no more within a block than MAX_CHANGE_BY_BLOCK_SIZE allows; None if there is
    none."""
    for size, max_change in MAX_CHANGE_BY_BLOCK_SIZE.items():
        num_missing = -query_bias.shape[-1] % size
        blocks = F.pad(query_bias, (0, num_missing), mode="replicate").unflatten(-1, (-1, size))
        changes = blocks.amax(-1) - blocks.amin(-1)
        if bool((changes <= max_change).all()):
            return size
    return None


class BlockPart(NamedTuple):
    """Hold some queries and some keys of a block, with the bias of their scores."""

    row_slice: slice
    key_slice: slice
    bias: Tensor
    """Bias of these pairs, (batch, num_heads, rows, keys), -inf for hidden pairs."""
    visible: Tensor | None
    """Mask of these pairs, False for hidden ones; None if none is hidden."""


def _block_parts(
    problem: Problem, query_bias: Tensor, key_bias: Tensor
) -> Iterator[list[BlockPart]]:
    """Yield for each block of queries up to three parts: of the keys that all its queries see, and
    of the keys before and after them. Keys so far away that they do not matter are left out."""
    dtype = at_least_float32(problem.q.dtype)
    block_size = _block_size(query_bias)
    assert block_size is not None
    negligible_threshold = problem.negligible_threshold()
    for start in range(0, problem.q_len, block_size):
        stop = min(start + block_size, problem.q_len)
        kv_start, kv_stop = problem.keys_maybe_visible(start, stop)
        kv_start = max(
            kv_start, _first_key_that_matters(problem, key_bias, start, stop, negligible_threshold)
        )
        shared_start, shared_stop = problem.keys_visible_to_all(start, stop)
        if shared_start == shared_stop:  # none is known to be visible to all
            shared_start = kv_start
            shared_stop = kv_start
        else:
            shared_start = max(shared_start, kv_start)
            shared_stop = min(shared_stop, kv_stop)

        middle = (start + stop) // 2
        bias = (query_bias[..., middle, None] - key_bias).to(dtype)[:, :, None]
        key_ranges = ((kv_start, shared_start), (shared_start, shared_stop), (shared_stop, kv_stop))
        parts = []
        for begin, end in key_ranges:
            if begin < end:
                part = _block_part(problem, bias, slice(start, stop), slice(begin, end))
                parts.append(part)
        yield parts


def _first_key_that_matters(
    problem: Problem, key_bias: Tensor, start: int, stop: int, negligible_threshold: Tensor
) -> int:
    """Return the index of the first key whose weight may matter to queries [start, stop); 0 if that
    is unknown.

    If the mask is exact, a query sees the key at its own position. So a key whose bias is far below
    that of this key has a negligible weight, however large q . k may be.

    Args:
        key_bias: (batch or 1, num_heads, kv_len); the bias of a query and a key is query_bias -
            key_bias.
        negligible_threshold: what `Problem.negligible_threshold` returns, (num_heads,), below 0.
    """
    query_offset = problem.mask_query_offset
    is_exact = problem.mask is not None and problem.mask.exact
    if query_offset is None or not is_exact or not is_readable(key_bias):
        return 0
    # The keys at the positions of these queries.
    own_key_start = start + query_offset
    own_key_stop = stop + query_offset
    every_query_has_its_key = own_key_start >= 0 and own_key_stop <= key_bias.shape[-1]
    if not every_query_has_its_key:
        return 0
    # The largest key_bias gives the lowest bias of a query and the key at its own position.
    largest_own_bias = key_bias[..., own_key_start:own_key_stop].amax(-1, keepdim=True)
    # A key is dropped if it and all before it are negligible.
    is_dropped = (largest_own_bias - key_bias).cummax(-1).values < negligible_threshold[:, None]
    return int(is_dropped.sum(-1).amin())


def _block_part(problem: Problem, bias: Tensor, row_slice: slice, key_slice: slice) -> BlockPart:
    """Return these queries (`row_slice`) and these keys, with the bias of their scores and the
    mask.

    bias: of all keys, (batch or 1, num_heads, 1, kv_len).
    """
    batch, num_heads = problem.q.shape[:2]
    shape = (batch, num_heads, row_slice.stop - row_slice.start, key_slice.stop - key_slice.start)
    part_bias = bias[..., key_slice].expand(shape)
    visible = problem.restricted_to_keys(key_slice.start, key_slice.stop).visibility_mask(
        row_slice.start, row_slice.stop
    )
    if visible is not None:
        part_bias = part_bias.masked_fill(~visible, -torch.inf)
    return BlockPart(row_slice, key_slice, part_bias, visible)


class _KeyRowsAttention(torch.autograd.Function):
    """Attend by blocks of queries. Inputs: q, k, v, query_bias, key_bias, and the problem without
    its term. Output: (batch, num_heads, q_len, v_dim)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_bias: Tensor,
        key_bias: Tensor,
        problem: Problem,
    ) -> Tensor:
        wide_q, wide_k, wide_v = flash.pad_to_same_width(q, k, v)
        outs = []
        lses = []
        for parts in _block_parts(problem, query_bias, key_bias):
            results = []
            for part in parts:
                some_q = wide_q[:, :, part.row_slice]
                some_k = wide_k[:, :, part.key_slice]
                some_v = wide_v[:, :, part.key_slice]
                results.append(
                    flash.attend(some_q, some_k, some_v, part.bias, problem.scale, part.visible)
                )
            out, lse = flash.join_attention(results)
            outs.append(out)
            lses.append(lse)
        out = torch.cat(outs, 2)[..., : v.shape[-1]]
        lse = torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, query_bias, key_bias, out, lse)
        ctx.problem = problem
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, query_bias, key_bias, out, lse = ctx.saved_tensors
        problem = ctx.problem
        if torch.is_grad_enabled():  # for second derivatives
            visible = problem.visibility_mask(0, problem.q_len)
            bias = query_bias[..., :, None] - key_bias[..., None, :]
            bias = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
            return *dense_gradients(
                (q, k, v, query_bias, key_bias), bias, problem.scale, grads
            ), None
        with without_autocast(q.device):  # backward may be called inside it
            return *_gradients(problem, q, k, v, query_bias, key_bias, out, lse, grads[0]), None


def _gradients(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_bias: Tensor,
    key_bias: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, query_bias and key_bias. That of query_bias is zero, because
    it cancels in the softmax.

    A channel of ones is appended to q and one of zeros to k, so that scores stay as they are:

        score[i, j] = scale * (q[i] . k[j] + 1 * 0) + query_bias[i] - key_bias[j]

    Then the gradient of that channel of k[j] is scale * (sum over i of d_score[i, j]), and the
    gradient of key_bias[j] is minus this sum. So the kernel's backward pass gives both.
    """
    num_heads = q.shape[1]
    width = q.shape[-1]
    v_dim = v.shape[-1]
    # One more channel, rounded up: kernels are faster at multiples of 8.
    padded_width = -(-(max(width, v_dim) + 1) // 8) * 8
    wide_q = _padded_copy(q, padded_width)
    wide_k = _padded_copy(repeat_kv_heads(k, num_heads), padded_width)
    wide_v = _padded_copy(repeat_kv_heads(v, num_heads), padded_width)
    wide_out = _padded_copy(out, padded_width)
    wide_grad = _padded_copy(grad, padded_width)
    wide_q[..., width] = 1
    lse = lse.masked_fill(lse == -torch.inf, 0)  # rows that see no key have weights 0

    dtype = at_least_float32(q.dtype)
    d_q = torch.zeros(wide_q.shape, dtype=dtype, device=q.device)
    d_k = torch.zeros(wide_k.shape, dtype=dtype, device=k.device)
    d_v = torch.zeros(wide_v.shape, dtype=dtype, device=v.device)
    for parts in _block_parts(problem, query_bias, key_bias):
        for part in parts:
            rows = flash.QueryRows(
                grad=wide_grad[:, :, part.row_slice],
                q=wide_q[:, :, part.row_slice],
                out=wide_out[:, :, part.row_slice],
                lse=lse[:, :, part.row_slice],
            )
            some_k = wide_k[:, :, part.key_slice]
            some_v = wide_v[:, :, part.key_slice]
            k_and_v = flash.zero_hidden_keys(part.visible, some_k, some_v)
            part_d_q, part_d_k, part_d_v = flash.gradients(rows, k_and_v, part.bias, problem.scale)
            d_q[:, :, part.row_slice] += part_d_q
            d_k[:, :, part.key_slice] += part_d_k
            d_v[:, :, part.key_slice] += part_d_v
    d_key_bias = (-d_k[..., width] / problem.scale).sum_to_size(key_bias.shape).to(key_bias.dtype)
    return (
        sum_head_groups(d_q[..., :width], q),
        sum_head_groups(d_k[..., :width], k),
        sum_head_groups(d_v[..., :v_dim], v),
        torch.zeros_like(query_bias),
        d_key_bias,
    )


def _padded_copy(t: Tensor, width: int) -> Tensor:
    """Return a copy of t with its last axis padded with zeros to `width`, which must be greater
    than that axis: without padding it would be t itself, and `_gradients` writes to the result."""
    return flash.make_last_axis_contiguous(F.pad(t, (0, width - t.shape[-1])))
