"""Compute the gradient of a bias by distance, by blocks of scores and without atomic additions.

The bias of query i and key j is row[q_len - 1 - i + j], so the gradient of an entry of the row is
the sum of the gradients of the scores on one diagonal:

    d_row[q_len - 1 - d] = sum of d_scores[i, j] over i - j = d
    d_scores = weights * (d_weights - delta),   weights = exp(scores - lse),
    d_weights = grad v^T,   delta[i] = grad[i] . out[i] - grad_lse[i]

`delta` is what flash attention calls so: the mean of d_weights by the weights of a query, which is
grad[i] . out[i], and from it the gradient of the log-sum-exp subtracted.

Scores are cut into blocks of BLOCK_SIZE queries and BLOCK_SIZE keys. Blocks along one diagonal of
blocks are equally far apart: their `offset` is the same (number of the block of queries minus
number of the block of keys), and so are the distances at the same places, here for 4 blocks of
each:

              keys
    queries   0  -1  -2  -3      The four blocks 0 are added up pair by pair,
              1   0  -1  -2      then their sum is summed along its diagonals.
              2   1   0  -1      The same is done for the three blocks 1, and so on.
              3   2   1   0

All sums have a fixed order, so results are reproducible bit for bit.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.encodings import has_triton
from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.numerics.tensor_views import repeat_kv_heads

BLOCK_SIZE = 128
"""Number of queries, and of keys, in a block that plain operations of torch compute."""
MAX_CPU_SCORES_BYTES = 8 * 2**20
"""Maximum bytes of the scores of all blocks that are computed at once, on the CPU."""
MAX_DEVICE_SCORES_BYTES = 512 * 2**20
"""Maximum bytes of the scores of all blocks that are computed at once, on other devices."""
ARRAYS_AT_ONCE = 3
"""Number of arrays as large as these scores that are in memory at the same time."""


def add_row_gradient(
    problem: Problem, row: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `out` and `lse` with the same numbers, such that a backward pass through them also
    computes the gradient of `row`.

    problem: the attention whose output and log-sum-exp these are. A kernel computed them, which
        gives gradients to q, k and v, but none to a bias.
    row: the bias by falling distance, (num_heads, q_len + kv_len - 1).
    """
    return _RowGradient.apply(out, lse, row, problem)  # type: ignore[return-value]


def extra_bytes(problem: Problem) -> int:
    """Return the peak memory, in bytes, that the backward pass needs for its blocks of scores."""
    batch, num_heads = problem.q.shape[:2]
    max_blocks_on_diagonal = -(-min(problem.q_len, problem.kv_len) // BLOCK_SIZE)
    scores_bytes = 4 * batch * num_heads * max_blocks_on_diagonal * BLOCK_SIZE**2
    return ARRAYS_AT_ONCE * min(_max_scores_bytes(problem.q.device), scores_bytes)


def _max_scores_bytes(device: torch.device) -> int:
    """Return the maximum bytes of the scores of all blocks that are computed at once on this
    device."""
    return MAX_CPU_SCORES_BYTES if device.type == "cpu" else MAX_DEVICE_SCORES_BYTES


class _RowGradient(torch.autograd.Function):
    """Return `out` and `lse` unchanged. In the backward pass their gradients go to the kernel that
    computed them, and the gradient of `row`, the bias by falling distance, is computed from them.
    """

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, row: Tensor, problem: Problem
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(problem.q, problem.k, problem.v, out, lse, row)
        ctx.problem = problem
        ctx.set_materialize_grads(False)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `out` and `lse` as they came, from which the kernel's own
        backward pass makes those of q, k and v, and the gradient of `row`. The kernel would add up
        the latter atomically, in any order, so that no two runs would agree to the last bit."""
        grad, grad_lse = grads
        if grad is None and grad_lse is None:
            return None, None, None, None
        q, k, v, out, lse, row = ctx.saved_tensors
        grad_or_zero = torch.zeros_like(out) if grad is None else grad
        with without_autocast(q.device):  # backward may be called inside it
            delta = (grad_or_zero.to(row.dtype) * out.to(row.dtype)).sum(-1)
            if grad_lse is not None:
                delta = delta - grad_lse
            # exp(-inf) = 0 is the weight of all keys for queries that see none.
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
            dtype = ctx.problem.product_dtype
            q, k, v, grad_or_zero = (t.to(dtype) for t in (q, k, v, grad_or_zero))
            inputs = ScoreInputs(q, k, v, grad_or_zero, lse, delta, row)
            d_row = _row_gradient(ctx.problem, inputs, grad_lse)
        return grad, grad_lse, d_row, None


class ScoreInputs(NamedTuple):
    """Hold tensors from which the gradients of scores are computed, by the formulas at the head of
    this file: q, k and v as in `Problem`, and those below."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    """Gradient of the output, (batch, num_heads, q_len, v_dim)."""
    lse: Tensor
    """Log-sum-exp of each query's scores, (batch, num_heads, q_len), inf for queries that see no
    key."""
    delta: Tensor
    """grad . out - grad_lse of each query, (batch, num_heads, q_len)."""
    row: Tensor
    """Bias by falling distance, (num_heads, q_len + kv_len - 1)."""


def _row_gradient(problem: Problem, inputs: ScoreInputs, grad_lse: Tensor | None) -> Tensor:
    """Return the gradient of the bias by falling distance, (num_heads, q_len + kv_len - 1).
    `grad_lse`: the gradient of the log-sum-exp, (batch, num_heads, q_len), or None."""
    row = inputs.row
    constant_from = _first_constant_distance(problem)
    if _kernel_runs(problem, inputs):
        from posenc.attend.ways import flex_bias_gradient_triton as kernel

        offsets = _block_offsets(problem, kernel.block_size(inputs.q, inputs.v), constant_from)
        contiguous_inputs = inputs._replace(
            lse=inputs.lse.contiguous(),
            delta=inputs.delta.contiguous(),
            row=row.contiguous(),
        )
        block_sums = kernel.diagonal_block_sums(
            *contiguous_inputs, problem.scale, problem.visible_distances, offsets
        )
    else:
        offsets = _block_offsets(problem, BLOCK_SIZE, constant_from)
        block_sums = _score_gradients_by_block_offset(problem, inputs, offsets)
    d_row = _sum_along_diagonals(block_sums, offsets[0], problem.q_len, row.shape[1])
    if constant_from <= problem.q_len - 1:
        # The gradients of a query's scores sum to that of its log-sum-exp, because its weights sum
        # to 1. The difference between this sum and that over the near entries is the gradient of
        # the far entries, which are one parameter: any of them gets it. `d_row` also has incomplete
        # sums of far entries, from blocks with near pairs. They are subtracted here, and cancel
        # where autograd adds up the gradients of all far entries.
        total_gradient = 0 if grad_lse is None else grad_lse.to(row.dtype).sum((0, 2))
        d_row[:, 0] += total_gradient - d_row.sum(-1)
    return d_row.to(row.dtype)


def _kernel_runs(problem: Problem, inputs: ScoreInputs) -> bool:
    """Return True if flex_bias_gradient_triton.py can compute this gradient: on CUDA, in one dtype,
    with a mask that depends on the distance only."""
    if problem.q.device.type != "cuda" or not has_triton():
        return False
    mask = problem.mask
    mask_is_by_distance = mask is None or (mask.exact and problem.mask_query_offset is not None)
    has_one_dtype = inputs.q.dtype == inputs.k.dtype == inputs.v.dtype == inputs.grad.dtype
    return mask_is_by_distance and has_one_dtype and inputs.row.dtype == torch.float32


def _block_offsets(problem: Problem, block_size: int, constant_from: int) -> range:
    """Return the offsets of blocks of scores for which sums are needed, in falling order. The
    offset is the number of the block of queries minus that of the block of keys.

    Needed are blocks with pairs that the mask may show, at distances below `constant_from`: from
    there on the bias is one parameter, which needs no sums of its own. block_size: number of
    queries, and of keys, of a block.
    """
    least_distance, greatest_distance = problem.visible_distances
    greatest_distance = min(greatest_distance, constant_from - 1)
    # With n = block_size, blocks with an offset have pairs at distances from offset * n - (n - 1)
    # to offset * n + (n - 1). The highest offset still has one at `greatest_distance` or below: it
    # is greatest_distance / n rounded up. The lowest has one at `least_distance` or above: it is
    # (least_distance - (n - 1)) / n rounded up. Both within what the numbers of blocks allow.
    highest_offset_with_pairs = (greatest_distance + block_size - 1) // block_size
    lowest_offset_with_pairs = -((block_size - 1 - least_distance) // block_size)
    highest_offset = min(highest_offset_with_pairs, (problem.q_len - 1) // block_size)
    lowest_offset = max(lowest_offset_with_pairs, -((problem.kv_len - 1) // block_size))
    return range(highest_offset, min(lowest_offset, highest_offset) - 1, -1)


class QueryBlocks(NamedTuple):
    """Hold tensors of queries in blocks, each (batch, num_heads, blocks, BLOCK_SIZE, width or
    1)."""

    q: Tensor
    grad: Tensor
    lse: Tensor
    delta: Tensor


class KeyBlocks(NamedTuple):
    """Hold tensors of keys in blocks, each (batch, num_heads, blocks, BLOCK_SIZE, width)."""

    k: Tensor
    v: Tensor


def _score_gradients_by_block_offset(
    problem: Problem, inputs: ScoreInputs, offsets: range
) -> Tensor:
    """Return the sums of the gradients of scores, added up over the batch and all blocks with the
    same offset, for each of the offsets: (len(offsets), num_heads, BLOCK_SIZE, BLOCK_SIZE).

    The offset of a block is the number of its block of queries minus that of its block of keys.
    """
    q, k, v, grad, lse, delta, row = inputs
    dtype = row.dtype
    batch, num_heads, q_len, _ = q.shape
    num_q_blocks = -(-q_len // BLOCK_SIZE)
    num_k_blocks = -(-k.shape[2] // BLOCK_SIZE)
    queries = QueryBlocks(
        q=_split_into_blocks((q * problem.scale).to(dtype), num_q_blocks),
        grad=_split_into_blocks(grad.to(dtype), num_q_blocks),
        # Queries of padding have weights exp(-inf) = 0.
        lse=_split_into_blocks(lse[..., None], num_q_blocks, torch.inf),
        delta=_split_into_blocks(delta[..., None], num_q_blocks),
    )
    keys = KeyBlocks(
        k=_split_into_blocks(repeat_kv_heads(k, num_heads).to(dtype), num_k_blocks),
        v=_split_into_blocks(repeat_kv_heads(v, num_heads).to(dtype), num_k_blocks),
    )
    block_bytes = 4 * batch * num_heads * BLOCK_SIZE**2  # scores of a block, in float32
    blocks_at_once = max(1, _max_scores_bytes(q.device) // block_bytes)
    block_sums = []
    for offset in offsets:
        bias = _block_bias(row, offset, q_len)
        block_sum = torch.zeros_like(bias)
        # Blocks of queries that have a block of keys `offset` before them.
        begin = max(0, offset)
        end = min(num_q_blocks, num_k_blocks + offset)
        for start in range(begin, end, blocks_at_once):
            stop = min(start + blocks_at_once, end)
            some_queries = QueryBlocks(*(t[:, :, start:stop] for t in queries))
            some_keys = KeyBlocks(*(t[:, :, start - offset : stop - offset] for t in keys))
            block_sum += _sum_score_gradients(
                problem, some_queries, some_keys, bias, start, start - offset
            )
        block_sums.append(block_sum)
    return torch.stack(block_sums)


def _first_constant_distance(problem: Problem) -> int:
    """Return the distance, index of a query minus index of a key, from which on the bias is one
    parameter of each head, as in T5's last bucket. Return a number above all distances if there is
    none, or if the mask hides all of these keys."""
    term = problem.term
    mask = problem.mask
    assert term is not None and problem.query_offset is not None
    beyond_all_distances = problem.q_len + problem.kv_len
    distances_are_comparable = (
        mask is not None and mask.causal and problem.mask_query_offset == problem.query_offset
    )
    if term.constant_from is None or not distances_are_comparable:
        return beyond_all_distances
    constant_from = term.constant_from - problem.query_offset
    _, greatest_distance = problem.visible_distances
    return constant_from if constant_from <= greatest_distance else beyond_all_distances


def _split_into_blocks(t: Tensor, num_blocks: int, padding: float = 0.0) -> Tensor:
    """Return t (batch, heads, len, width) as (batch, heads, num_blocks, BLOCK_SIZE, width). The
    number `padding` fills up the last block."""
    num_missing = num_blocks * BLOCK_SIZE - t.shape[2]
    padded = F.pad(t, (0, 0, 0, num_missing), value=padding)
    return padded.unflatten(2, (num_blocks, BLOCK_SIZE))


def _places_in_bias_row(offset: int, q_len: int, device: torch.device) -> Tensor:
    """Return the index in `row`, the bias by falling distance, that each pair of a block reads:
    (BLOCK_SIZE, BLOCK_SIZE).

    Element q_len - 1 - d of the row is the bias of distance d. Query i and key j of two blocks that
    lie `offset` blocks from each other have the distance offset * BLOCK_SIZE + i - j. Pairs of
    padding may read outside of the row.
    """
    index_in_block = torch.arange(BLOCK_SIZE, device=device)
    return q_len - 1 - offset * BLOCK_SIZE - index_in_block[:, None] + index_in_block


def _block_bias(row: Tensor, offset: int, q_len: int) -> Tensor:
    """Return the bias of a block of scores, (num_heads, BLOCK_SIZE, BLOCK_SIZE), whose queries lie
    `offset` blocks after its keys. row: the bias by falling distance."""
    # Padding may read outside of the row: any entry will do, its weight is 0.
    return row[:, _places_in_bias_row(offset, q_len, row.device).clamp(0, row.shape[1] - 1)]


def _sum_score_gradients(
    problem: Problem,
    queries: QueryBlocks,
    keys: KeyBlocks,
    bias: Tensor,
    first_q_block: int,
    first_k_block: int,
) -> Tensor:
    """Return the gradients of the scores of several blocks with the same offset, added up over the
    blocks and the batch: (num_heads, BLOCK_SIZE, BLOCK_SIZE).

    bias: the bias of every one of these blocks, (num_heads, BLOCK_SIZE, BLOCK_SIZE).
    first_q_block, first_k_block: the numbers of the first block of queries, and of the first block
        of keys, counted from 0.
    """
    scores = (queries.q @ keys.k.mT).add_(bias[:, None]).sub_(queries.lse)
    num_blocks = queries.q.shape[2]
    is_left_out = _is_hidden_or_padding(problem, first_q_block, first_k_block, num_blocks)
    scores.masked_fill_(is_left_out, -torch.inf)
    weights = scores.exp_()
    d_scores = (queries.grad @ keys.v.mT).sub_(queries.delta).mul_(weights)
    return d_scores.sum((0, 2))


def _is_hidden_or_padding(
    problem: Problem, first_q_block: int, first_k_block: int, num_blocks: int
) -> Tensor:
    """Return True for pairs that the mask hides or that are padding, in blocks first_q_block,
    first_q_block + 1, ... of queries with blocks first_k_block, first_k_block + 1, ... of keys:
    (batch or 1, num_heads or 1, num_blocks, BLOCK_SIZE, BLOCK_SIZE)."""
    device = problem.q.device
    block_start = torch.arange(num_blocks, device=device)[:, None] * BLOCK_SIZE
    index_in_block = torch.arange(BLOCK_SIZE, device=device)
    q_idx = first_q_block * BLOCK_SIZE + block_start + index_in_block
    q_idx = q_idx[:, :, None]  # (num_blocks, BLOCK_SIZE, 1)
    k_idx = first_k_block * BLOCK_SIZE + block_start + index_in_block
    k_idx = k_idx[:, None]  # (num_blocks, 1, BLOCK_SIZE)
    is_padding = (q_idx >= problem.q_len) | (k_idx >= problem.kv_len)
    if problem.mask is None:
        return is_padding[None, None]
    batch_index = torch.arange(problem.q.shape[0], device=device).view(-1, 1, 1, 1, 1)
    head_index = torch.arange(problem.q.shape[1], device=device).view(-1, 1, 1, 1)
    # Masks may look up a token by its index, and padding has none.
    q_idx_inside = q_idx.clamp(max=problem.q_len - 1)
    k_idx_inside = k_idx.clamp(max=problem.kv_len - 1)
    visible = problem.mask(batch_index, head_index, q_idx_inside, k_idx_inside)
    return ~visible | is_padding


def _sum_along_diagonals(block_sums: Tensor, first_offset: int, q_len: int, row_len: int) -> Tensor:
    """Return the gradient of the bias by falling distance, (num_heads, row_len): the sums along the
    diagonals of `block_sums`.

    block_sums: sums of the gradients of scores, (offsets, num_heads, size, size); the first is of
        the blocks with `first_offset`, each further one of those with an offset less by 1.
    """
    num_offsets, num_heads, size, _ = block_sums.shape
    # Row i of the buffer is row size - 1 - i of the sums shifted right by i, so that diagonals
    # become columns. The first column is for the last query and the first key of a block.
    buffer = block_sums.new_zeros(num_offsets, num_heads, size, 2 * size)
    strides = (num_heads * 2 * size**2, 2 * size**2, 2 * size + 1, 1)
    buffer.as_strided(block_sums.shape, strides).copy_(block_sums.flip(2))
    diagonal_sums = buffer.sum(2).transpose(0, 1)  # (num_heads, num_offsets, 2 * size)
    # The second half of each sum is for the same distances as the first half of the next one.
    first_halves, second_halves = (half.flatten(1) for half in diagonal_sums.split(size, -1))
    diagonal_gradients = F.pad(first_halves, (0, size)) + F.pad(second_halves, (size, 0))
    # Entries of the row before the first column, and after the last one.
    num_missing_before = q_len - 1 - first_offset * size - (size - 1)
    num_missing_after = row_len - num_missing_before - diagonal_gradients.shape[1]
    # A negative number drops columns.
    return F.pad(diagonal_gradients, (num_missing_before, num_missing_after))
