"""Compute the gradient of a bias by distance, by blocks of scores and without atomic additions.

The bias of query i and key j is row[q_len - 1 - i + j], so the gradient of an entry of the row is
the sum of the gradients of the scores on one diagonal:

    d_row[q_len - 1 - d] = sum of d_scores[i, j] over i - j = d
    d_scores = weights * (d_weights - mean),   weights = exp(scores - lse),
    d_weights = grad v^T,   mean[i] = grad[i] . out[i] - grad_lse[i]

Pairs of BLOCK queries and BLOCK keys that lie along one diagonal of blocks have their diagonals at
the same places, so they are added up block by block, and only their sum is summed along diagonals.
All sums have a fixed order, so results are reproducible bit for bit.
"""

from typing import Any

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
    blocks = -(-min(problem.q_len, problem.kv_len) // BLOCK)
    return ARRAYS * min(_most_bytes(problem.q.device), 4 * batch * heads * blocks * BLOCK**2)


def _most_bytes(device: torch.device) -> int:
    return BYTES.get(device.type, DEVICE_BYTES)


class _OfRow(torch.autograd.Function):
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
        (grad, grad_lse), (q, k, v, out, lse, row) = grads, ctx.saved_tensors
        if grad is None and grad_lse is None:
            return None, None, None, None
        given = torch.zeros_like(out) if grad is None else grad
        with without_autocast(q.device):  # backward may be called inside it
            d_row = _gradient(ctx.problem, (q, k, v, out, lse, row), given, grad_lse)
        return grad, grad_lse, d_row, None


def _gradient(
    problem: Problem, saved: tuple[Tensor, ...], grad: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """Return the gradient of the row."""
    q, k, v, out, lse, row = saved
    mean = (grad.to(row.dtype) * out.to(row.dtype)).sum(-1)
    if grad_lse is not None:
        mean = mean - grad_lse
    # exp(-inf) = 0 is the weight of all keys for queries that see none.
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    constant = _constant_from(problem)  # by index, as all distances here
    q, k, v, grad = (t.to(problem.product_dtype) for t in (q, k, v, grad))
    tensors = q, k, v, grad, lse, mean, row
    if _kernel_runs(problem, tensors):
        from posenc.attend.ways import diagonals_kernel as kernel

        aparts = _aparts(problem, kernel.block_of(q, v), constant)
        lse, mean, row = lse.contiguous(), mean.contiguous(), row.contiguous()
        scale, distances = problem.scale, problem.distances
        found = kernel.totals(q, k, v, grad, lse, mean, row, scale, distances, aparts)
    else:
        aparts = _aparts(problem, BLOCK, constant)
        found = _totals(problem, tensors, aparts)
    d_row = _along_diagonals(found, aparts[0], problem.q_len, row.shape[1])
    if constant <= problem.q_len - 1:
        # The gradients of a query's scores sum to that of its log-sum-exp, so the rest is that of
        # the one parameter which all entries of the row for far keys are.
        whole = 0 if grad_lse is None else grad_lse.to(row.dtype).sum((0, 2))
        d_row[:, 0] += whole - d_row.sum(-1)
    return d_row.to(row.dtype)


def _kernel_runs(problem: Problem, tensors: tuple[Tensor, ...]) -> bool:
    """Return True if one kernel can do it: on CUDA, with a mask that depends on distance only."""
    mask, on_cuda = problem.mask, problem.q.device.type == "cuda"
    exact = mask is None or (mask.exact and problem.mask_shift is not None)
    alike = len({t.dtype for t in tensors[:4]}) == 1 and tensors[-1].dtype == torch.float32
    return exact and alike and on_cuda and has_triton()


def _aparts(problem: Problem, block: int, constant: int) -> range:
    """Return how many blocks queries may be after the keys whose bias matters, in falling order."""
    least, most = problem.distances
    most = min(most, constant - 1)
    # The distances of a pair of blocks are those of their first tokens, up to block - 1 off.
    high = min((most + block - 1) // block, (problem.q_len - 1) // block)
    low = max(-((block - 1 - least) // block), -((problem.kv_len - 1) // block))
    return range(high, min(low, high) - 1, -1)


def _totals(problem: Problem, tensors: tuple[Tensor, ...], aparts: range) -> Tensor:
    """Return the sums of the gradients of scores of blocks that are `aparts` apart: (len(aparts),
    num_heads, BLOCK, BLOCK)."""
    q, k, v, grad, lse, mean, row = tensors
    dtype, (batch, heads, q_len, _), kv_len = row.dtype, q.shape, k.shape[2]
    q_blocks, k_blocks = (-(-n // BLOCK) for n in (q_len, kv_len))
    query_blocks = [_in_blocks(t.to(dtype), q_blocks) for t in (q * problem.scale, grad)]
    # Queries of padding have weights exp(-inf) = 0.
    query_blocks += [_in_blocks(lse[..., None], q_blocks, torch.inf)]
    query_blocks += [_in_blocks(mean[..., None], q_blocks)]
    key_blocks = [_in_blocks(for_every_head(t, heads).to(dtype), k_blocks) for t in (k, v)]
    at_once = max(1, _most_bytes(q.device) // (4 * batch * heads * BLOCK**2))
    found = []
    for apart in aparts:
        bias = _tile(row, apart, q_len)
        total = torch.zeros_like(bias)
        for first in range(max(0, apart), min(q_blocks, k_blocks + apart), at_once):
            last = min(first + at_once, q_blocks, k_blocks + apart)
            mine = [t[:, :, first:last] for t in query_blocks]
            theirs = [t[:, :, first - apart : last - apart] for t in key_blocks]
            total += _of_blocks(problem, mine, theirs, bias, first, first - apart)
        found.append(total)
    return torch.stack(found)


def _constant_from(problem: Problem) -> int:
    """Return the distance by index from which on the bias is one parameter of each head; more than
    any distance if that is not known, or if the mask hides all of these."""
    term, mask = problem.term, problem.mask
    assert term is not None and problem.shift is not None
    known = mask is not None and mask.causal and problem.mask_shift == problem.shift
    if term.constant_from is None or not known:
        return problem.q_len + problem.kv_len
    constant = term.constant_from - problem.shift
    return constant if constant <= problem.distances[1] else problem.q_len + problem.kv_len


def _in_blocks(t: Tensor, blocks: int, value: float = 0.0) -> Tensor:
    """Return (batch, heads, len, width) as (batch, heads, blocks, BLOCK, width), padded."""
    missing = blocks * BLOCK - t.shape[2]
    return F.pad(t, (0, 0, 0, missing), value=value).unflatten(2, (blocks, BLOCK))


def _places(apart: int, q_len: int, device: torch.device) -> Tensor:
    """Return the index in the row of each pair of a block, (BLOCK, BLOCK), for blocks of queries
    that are `apart` blocks after that of the keys. It may be outside of the row for padding."""
    within = torch.arange(BLOCK, device=device)
    return q_len - 1 - apart * BLOCK - within[:, None] + within


def _tile(row: Tensor, apart: int, q_len: int) -> Tensor:
    """Return the bias of a block, (num_heads, BLOCK, BLOCK)."""
    return row[:, _places(apart, q_len, row.device).clamp(0, row.shape[1] - 1)]


def _of_blocks(
    problem: Problem,
    mine: list[Tensor],
    theirs: list[Tensor],
    bias: Tensor,
    q_block: int,
    k_block: int,
) -> Tensor:
    """Return the sum of the gradients of the scores of several blocks, (num_heads, BLOCK, BLOCK).
    The first one has queries from block `q_block` on, and keys from `k_block` on."""
    (q, grad, lse, mean), (k, v) = mine, theirs
    scores = (q @ k.mT).add_(bias[:, None]).sub_(lse)
    scores.masked_fill_(_hidden(problem, q_block, k_block, q.shape[2]), -torch.inf)
    d_scores = (grad @ v.mT).sub_(mean).mul_(scores.exp_())
    return d_scores.sum((0, 2))


def _hidden(problem: Problem, q_block: int, k_block: int, blocks: int) -> Tensor:
    """Return True for pairs that are hidden or padding, (batch or 1, num_heads or 1, blocks, BLOCK,
    BLOCK)."""
    device = problem.q.device
    block = torch.arange(blocks, device=device)[:, None] * BLOCK
    within = torch.arange(BLOCK, device=device)
    q_idx, k_idx = ((first * BLOCK + block + within) for first in (q_block, k_block))
    padding = (q_idx >= problem.q_len)[..., None] | (k_idx >= problem.kv_len)[:, None]
    if problem.mask is None:
        return padding[None, None]
    batch, heads = (torch.arange(n, device=device) for n in problem.q.shape[:2])
    seen = problem.mask(
        batch.view(-1, 1, 1, 1, 1),
        heads.view(-1, 1, 1, 1),
        q_idx.clamp(max=problem.q_len - 1)[..., None],
        k_idx.clamp(max=problem.kv_len - 1)[:, None],
    )
    return ~seen | padding


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
    begin = q_len - 1 - apart * block - (block - 1)  # place of the first column in the row
    before, after = begin, row_len - begin - joined.shape[1]
    return F.pad(joined, (before, after))
