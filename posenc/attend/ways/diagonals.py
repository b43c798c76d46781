"""Compute the gradient of a bias by distance, by blocks of scores and without atomic additions.

The bias of query i and key j is row[q_len - 1 - i + j], so the gradient of an entry of the row is
the sum of the gradients of the scores on one diagonal:

    d_row[q_len - 1 - d] = sum of d_scores[i, j] over i - j = d
    d_scores = weights * (d_weights - mean),   weights = exp(scores - lse),
    d_weights = grad v^T,   mean[i] = grad[i] . out[i] - grad_lse[i]

Scores are cut into blocks of BLOCK queries and BLOCK keys. Blocks along one diagonal of blocks are
equally far `apart` (block of queries minus block of keys), and so have the same distances at the
same places, here for 4 blocks of each:

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
from posenc.encodings.numbers.heads import for_every_head
from posenc.encodings.numbers.precision import without_autocast

BLOCK = 128
"""Queries, and keys, of a block, if plain operations of torch compute it."""
BYTES = {"cpu": 8 * 2**20}
DEVICE_BYTES = 512 * 2**20
"""Maximum size of the scores of blocks that are computed at once."""
ARRAYS = 3
"""Arrays of this size in memory at the same time."""


def with_gradient(problem: Problem, row: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse, which a kernel computed from the numbers of `row`, with a gradient for
    the row. Gradients of q, k and v are the kernel's own."""
    return _OfRow.apply(out, lse, row, problem)  # type: ignore[return-value]


def extra_bytes(problem: Problem) -> int:
    """Return the peak memory of the backward pass."""
    batch, heads = problem.q.shape[:2]
    longest_diagonal = -(-min(problem.q_len, problem.kv_len) // BLOCK)  # in blocks
    scores = 4 * batch * heads * longest_diagonal * BLOCK**2
    return ARRAYS * min(_most_bytes(problem.q.device), scores)


def _most_bytes(device: torch.device) -> int:
    """Return the maximum bytes of one array of scores at a time."""
    return BYTES.get(device.type, DEVICE_BYTES)


class _OfRow(torch.autograd.Function):
    """Return out and lse unchanged. Their gradients pass on to the kernel, and give the row's."""

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
        grad, grad_lse = grads
        if grad is None and grad_lse is None:
            return None, None, None, None
        q, k, v, out, lse, row = ctx.saved_tensors
        grad_or_zero = torch.zeros_like(out) if grad is None else grad
        with without_autocast(q.device):  # backward may be called inside it
            mean = (grad_or_zero.to(row.dtype) * out.to(row.dtype)).sum(-1)
            if grad_lse is not None:
                mean = mean - grad_lse
            # exp(-inf) = 0 is the weight of all keys for queries that see none.
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
            dtype = ctx.problem.product_dtype
            q, k, v, grad_or_zero = (t.to(dtype) for t in (q, k, v, grad_or_zero))
            inputs = Inputs(q, k, v, grad_or_zero, lse, mean, row)
            d_row = _gradient(ctx.problem, inputs, grad_lse)
        return grad, grad_lse, d_row, None


class Inputs(NamedTuple):
    """What the gradients of scores are computed from; the head of this file says how."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    lse: Tensor
    mean: Tensor
    row: Tensor


def _gradient(problem: Problem, inputs: Inputs, grad_lse: Tensor | None) -> Tensor:
    """Return the gradient of the row."""
    row = inputs.row
    constant_from = _constant_from(problem)
    if _kernel_runs(problem, inputs):
        from posenc.attend.ways import diagonals_kernel as kernel

        aparts = _aparts(problem, kernel.block_of(inputs.q, inputs.v), constant_from)
        adjacent = inputs._replace(
            lse=inputs.lse.contiguous(),
            mean=inputs.mean.contiguous(),
            row=row.contiguous(),
        )
        totals = kernel.totals(*adjacent, problem.scale, problem.distances, aparts)
    else:
        aparts = _aparts(problem, BLOCK, constant_from)
        totals = _totals(problem, inputs, aparts)
    d_row = _along_diagonals(totals, aparts[0], problem.q_len, row.shape[1])
    if constant_from <= problem.q_len - 1:
        # The gradients of a query's scores sum to that of its log-sum-exp, because its weights sum
        # to 1. What the near entries leave of this sum belongs to the far ones: one parameter.
        whole = 0 if grad_lse is None else grad_lse.to(row.dtype).sum((0, 2))
        d_row[:, 0] += whole - d_row.sum(-1)
    return d_row.to(row.dtype)


def _kernel_runs(problem: Problem, inputs: Inputs) -> bool:
    """Return True if one kernel can do it: on CUDA, with a mask that depends on distance only."""
    if problem.q.device.type != "cuda" or not has_triton():
        return False
    mask = problem.mask
    by_distance = mask is None or (mask.exact and problem.mask_shift is not None)
    same_dtype = inputs.q.dtype == inputs.k.dtype == inputs.v.dtype == inputs.grad.dtype
    return by_distance and same_dtype and inputs.row.dtype == torch.float32


def _aparts(problem: Problem, block: int, constant_from: int) -> range:
    """Return how many blocks queries may be after the keys whose bias matters, in falling order.
    From distance `constant_from` on the bias is one parameter, which needs no sums of its own."""
    least, most = problem.distances
    most = min(most, constant_from - 1)
    # Blocks that are `apart` apart have pairs at distances from apart * block - (block - 1) to
    # apart * block + (block - 1). The highest `apart` still has one at `most` or below, so it is
    # most / block rounded up; the lowest has one at `least` or above: (least - (block - 1)) / block
    # rounded up. Both within what the numbers of blocks allow.
    highest = min((most + block - 1) // block, (problem.q_len - 1) // block)
    lowest = max(-((block - 1 - least) // block), -((problem.kv_len - 1) // block))
    return range(highest, min(lowest, highest) - 1, -1)


class Queries(NamedTuple):
    """Inputs of queries in blocks, each (batch, num_heads, blocks, BLOCK, width or 1)."""

    q: Tensor
    grad: Tensor
    lse: Tensor
    mean: Tensor


class Keys(NamedTuple):
    """Inputs of keys in blocks, each (batch, num_heads, blocks, BLOCK, width)."""

    k: Tensor
    v: Tensor


def _totals(problem: Problem, inputs: Inputs, aparts: range) -> Tensor:
    """Return the sums of the gradients of scores of blocks that are `aparts` apart: (len(aparts),
    num_heads, BLOCK, BLOCK)."""
    q, k, v, grad, lse, mean, row = inputs
    dtype = row.dtype
    batch, heads, q_len, _ = q.shape
    q_blocks = -(-q_len // BLOCK)
    k_blocks = -(-k.shape[2] // BLOCK)
    queries = Queries(
        q=_in_blocks((q * problem.scale).to(dtype), q_blocks),
        grad=_in_blocks(grad.to(dtype), q_blocks),
        # Queries of padding have weights exp(-inf) = 0.
        lse=_in_blocks(lse[..., None], q_blocks, torch.inf),
        mean=_in_blocks(mean[..., None], q_blocks),
    )
    keys = Keys(
        k=_in_blocks(for_every_head(k, heads).to(dtype), k_blocks),
        v=_in_blocks(for_every_head(v, heads).to(dtype), k_blocks),
    )
    at_once = max(1, _most_bytes(q.device) // (4 * batch * heads * BLOCK**2))
    totals = []
    for apart in aparts:
        bias = _tile(row, apart, q_len)
        total = torch.zeros_like(bias)
        # Blocks of queries that have a block of keys `apart` before them.
        begin = max(0, apart)
        end = min(q_blocks, k_blocks + apart)
        for first in range(begin, end, at_once):
            last = min(first + at_once, end)
            some_queries = Queries(*(t[:, :, first:last] for t in queries))
            some_keys = Keys(*(t[:, :, first - apart : last - apart] for t in keys))
            total += _of_blocks(problem, some_queries, some_keys, bias, first, first - apart)
        totals.append(total)
    return torch.stack(totals)


def _constant_from(problem: Problem) -> int:
    """Return the distance, by index as all distances here, from which on the bias is one parameter
    of each head; more than any distance if that is not known, or if the mask hides all of these."""
    term = problem.term
    mask = problem.mask
    assert term is not None and problem.shift is not None
    more_than_any = problem.q_len + problem.kv_len
    comparable = mask is not None and mask.causal and problem.mask_shift == problem.shift
    if term.constant_from is None or not comparable:
        return more_than_any
    constant_from = term.constant_from - problem.shift
    _, most = problem.distances
    return constant_from if constant_from <= most else more_than_any


def _in_blocks(t: Tensor, blocks: int, value: float = 0.0) -> Tensor:
    """Return (batch, heads, len, width) as (batch, heads, blocks, BLOCK, width), padded."""
    missing = blocks * BLOCK - t.shape[2]
    return F.pad(t, (0, 0, 0, missing), value=value).unflatten(2, (blocks, BLOCK))


def _places(apart: int, q_len: int, device: torch.device) -> Tensor:
    """Return which element of the bias's row each pair of a block reads, (BLOCK, BLOCK).

    The row has the bias of each distance, the largest first: element q_len - 1 - d is that of
    distance d. Query i and key j of two blocks that lie `apart` blocks from each other have the
    distance apart * BLOCK + i - j. Pairs of padding may read outside of the row.
    """
    within = torch.arange(BLOCK, device=device)
    return q_len - 1 - apart * BLOCK - within[:, None] + within


def _tile(row: Tensor, apart: int, q_len: int) -> Tensor:
    """Return the bias of a block, (num_heads, BLOCK, BLOCK)."""
    return row[:, _places(apart, q_len, row.device).clamp(0, row.shape[1] - 1)]


def _of_blocks(
    problem: Problem, queries: Queries, keys: Keys, bias: Tensor, q_block: int, k_block: int
) -> Tensor:
    """Return the sum of the gradients of the scores of several blocks, (num_heads, BLOCK, BLOCK).
    The first one has queries from block `q_block` on, and keys from `k_block` on."""
    scores = (queries.q @ keys.k.mT).add_(bias[:, None]).sub_(queries.lse)
    blocks = queries.q.shape[2]
    scores.masked_fill_(_hidden(problem, q_block, k_block, blocks), -torch.inf)
    weights = scores.exp_()
    d_scores = (queries.grad @ keys.v.mT).sub_(queries.mean).mul_(weights)
    return d_scores.sum((0, 2))


def _hidden(problem: Problem, q_block: int, k_block: int, blocks: int) -> Tensor:
    """Return True for pairs that are hidden or padding, (batch or 1, num_heads or 1, blocks, BLOCK,
    BLOCK)."""
    device = problem.q.device
    block = torch.arange(blocks, device=device)[:, None] * BLOCK
    within = torch.arange(BLOCK, device=device)
    q_idx = (q_block * BLOCK + block + within)[:, :, None]  # (blocks, BLOCK, 1)
    k_idx = (k_block * BLOCK + block + within)[:, None]  # (blocks, 1, BLOCK)
    padding = (q_idx >= problem.q_len) | (k_idx >= problem.kv_len)
    if problem.mask is None:
        return padding[None, None]
    batch = torch.arange(problem.q.shape[0], device=device).view(-1, 1, 1, 1, 1)
    heads = torch.arange(problem.q.shape[1], device=device).view(-1, 1, 1, 1)
    q_inside = q_idx.clamp(max=problem.q_len - 1)
    k_inside = k_idx.clamp(max=problem.kv_len - 1)
    visible = problem.mask(batch, heads, q_inside, k_inside)
    return ~visible | padding


def _along_diagonals(totals: Tensor, apart: int, q_len: int, row_len: int) -> Tensor:
    """Return the gradient of the row from sums of blocks (aparts, num_heads, block, block), whose
    queries are `apart` blocks after their keys in the first, and one block less in each next."""
    count, heads, block, _ = totals.shape
    # Row i of the buffer is row block - 1 - i of the total shifted right by i, so that diagonals
    # become columns. The first column is for the last query and the first key of a block.
    buffer = totals.new_zeros(count, heads, block, 2 * block)
    strides = (heads * 2 * block**2, 2 * block**2, 2 * block + 1, 1)
    buffer.as_strided(totals.shape, strides).copy_(totals.flip(2))
    sums = buffer.sum(2).transpose(0, 1)  # (num_heads, count, 2 * block)
    # The second half of each has the distances of the first half of the next one.
    first, second = (half.flatten(1) for half in sums.split(block, -1))
    joined = F.pad(first, (0, block)) + F.pad(second, (block, 0))
    before = q_len - 1 - apart * block - (block - 1)  # place of the first column in the row
    after = row_len - before - joined.shape[1]
    return F.pad(joined, (before, after))  # a negative number drops columns
