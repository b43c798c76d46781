"""Attend with a bias that is a term of the query minus a term of the key, from one row per block.

score[i, j] += row[i] - key[j]. With a causal mask row[i] cancels in the softmax, so a block of
queries needs only one row of bias, which torch's flash kernel reads as a mask with stride 0 along
the queries. The bias is relative to the middle of the block, so it is small near the block and as
precise at key 100,000 as at key 100. Blocks are so short that this holds for all their queries.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.problem import Problem
from posenc.attend.ways import flash
from posenc.attend.ways.second_derivatives import dense_gradients
from posenc.attend.ways.strips_backward import of_groups
from posenc.encodings.numbers.heads import for_every_head
from posenc.encodings.numbers.precision import at_least_float32, without_autocast
from posenc.encodings.numbers.tracking import readable

ROWS = 512
"""Maximum queries per block, which read one row of bias."""
FALL = {ROWS: 64, 128: 128, 32: 128}
"""Queries per block, and how much row[i] may change within such a block, because large numbers are
coarse (float32 rounds 64 by up to 4e-6) and tiny weights slow."""
LARGEST = {torch.float32: 2.0**28, torch.float64: 2.0**12}
"""Maximum size of row and key for scores of this dtype: float64 then rounds their difference by
less than 1e-7, and 1e-12."""


def run(problem: Problem) -> tuple[Tensor, None]:
    """Attend by blocks of queries. choose.py has checked that term and mask allow it."""
    row, key = _row_and_key(problem)
    dtype = problem.product_dtype
    q, k, v = (t.to(dtype) for t in (problem.q, problem.k, problem.v))
    if torch.is_grad_enabled() and (row.requires_grad or key.requires_grad):
        # In 16 bits the rounding of the output would be all that is left of the key's gradient,
        # whose sum over keys cancels.
        q, k, v = (t.to(at_least_float32(dtype)) for t in (q, k, v))
    with without_autocast(q.device):
        out = _KeyRows.apply(q, k, v, row, key, replace(problem, term=None))
    return out, None  # type: ignore[return-value]


def why_not(problem: Problem) -> str | None:
    """Return why the numbers of row and key do not allow this way; None if they do."""
    row, key = (t.detach() for t in _row_and_key(problem))
    largest = float(torch.maximum(row.abs().amax(), key.abs().amax()))
    if not largest <= LARGEST[at_least_float32(problem.q.dtype)]:
        return "its positions or gates span too much for one row of bias per block"
    if _block_size(row) is None:
        return "the bias changes too much between neighbouring queries for one row per block"
    return None


def _row_and_key(problem: Problem) -> tuple[Tensor, Tensor]:
    """Return row and key of the term, each (batch or 1, num_heads, len)."""
    assert problem.term is not None and problem.term.per_key is not None
    row, key = (t if t.ndim == 3 else t[None] for t in problem.term.per_key())
    return row, key


def _block_size(row: Tensor) -> int | None:
    """Return the largest number of queries per block of FALL for which row changes little enough;
    None if there is none."""
    for size, most in FALL.items():
        blocks = F.pad(row, (0, -row.shape[-1] % size), mode="replicate").unflatten(-1, (-1, size))
        if bool((blocks.amax(-1) - blocks.amin(-1) <= most).all()):
            return size
    return None


Part = tuple[slice, slice, Tensor, Tensor | None]
"""(rows, keys, bias, visible): the bias of their scores, -inf for hidden pairs; visible is True for
the others, or None if no pair is hidden."""


def _blocks(problem: Problem, row: Tensor, key: Tensor) -> Iterator[list[Part]]:
    """Yield each block of queries as parts: the keys that all its queries see, and the keys before
    and after them."""
    q_len, heads, dtype = problem.q_len, problem.q.shape[1], at_least_float32(problem.q.dtype)
    size = _block_size(row)
    assert size is not None
    # Others are compared with the key at a query's own position, which an exact mask shows.
    exact = problem.mask is not None and problem.mask.exact and readable(key)
    shift, least = problem.mask_shift if exact else None, problem.negligible()
    for start in range(0, q_len, size):
        stop = min(start + size, q_len)
        first, last = problem.maybe_visible(start, stop)
        if shift is not None and 0 <= start + shift and stop + shift <= key.shape[-1]:
            own = key[..., start + shift : stop + shift].amax(-1, keepdim=True)
            far = (own - key).cummax(-1).values < least[:, None]
            first = max(first, int(far.sum(-1).amin()))
        begin, end = problem.all_visible(start, stop)
        begin, end = (first, first) if begin == end else (max(begin, first), min(end, last))
        bias = (row[..., (start + stop) // 2, None] - key).to(dtype)[:, :, None]
        parts = []
        for lower, upper in ((first, begin), (begin, end), (end, last)):
            if lower < upper:
                shape = (len(problem.q), heads, stop - start, upper - lower)
                added = bias[..., lower:upper].expand(shape)
                visible = problem.among(lower, upper).visible(start, stop)
                if visible is not None:
                    added = added.masked_fill(~visible, -torch.inf)
                parts.append((slice(start, stop), slice(lower, upper), added, visible))
        yield parts


class _KeyRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, row: Tensor, key: Tensor, problem: Problem
    ) -> Tensor:
        wide_q, wide_k, wide_v = flash.same_width(q, k, v)
        outs, lses = [], []
        for parts in _blocks(problem, row, key):
            found = []
            for rows, keys, bias, visible in parts:
                block = wide_q[:, :, rows], wide_k[:, :, keys], wide_v[:, :, keys]
                found.append(flash.attend(*block, bias, problem.scale, visible))
            out, lse = flash.join(found)
            outs.append(out)
            lses.append(lse)
        out, lse = torch.cat(outs, 2)[..., : v.shape[-1]], torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, row, key, out, lse)
        ctx.problem = problem
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, row, key, out, lse = ctx.saved_tensors
        problem = ctx.problem
        if torch.is_grad_enabled():  # for second derivatives
            visible = problem.visible(0, problem.q_len)
            bias = row[..., :, None] - key[..., None, :]
            bias = bias if visible is None else bias.masked_fill(~visible, -torch.inf)
            return *dense_gradients((q, k, v, row, key), bias, problem.scale, grads), None
        with without_autocast(q.device):  # backward may be called inside it
            return *_gradients(problem, q, k, v, row, key, out, lse, grads[0]), None


def _gradients(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row: Tensor,
    key: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, row and key; that of row is zero.

    A column of ones is appended to q and one of zeros to k. The gradient of the latter is the sum
    of the gradients of a key's scores, which is the gradient of its term.
    """
    given, heads, width, v_dim = (q, k, v), q.shape[1], q.shape[-1], v.shape[-1]
    lse = lse.masked_fill(lse == -torch.inf, 0)  # rows that see no key have weights 0
    size = -(-(max(width, v_dim) + 1) // 8) * 8  # kernels are faster at multiples of 8
    every = [q, *(for_every_head(t, heads) for t in (k, v)), out, grad]
    q, k, v, out, grad = (flash.adjacent(F.pad(t, (0, size - t.shape[-1]))) for t in every)
    q[..., width] = 1
    wide = at_least_float32(q.dtype)
    d_q, d_k, d_v = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    for parts in _blocks(problem, row, key):
        for rows, keys, bias, visible in parts:
            mine = flash.Rows(*(t[:, :, rows] for t in (grad, q, out, lse)))
            theirs = flash.seen(visible, k[:, :, keys], v[:, :, keys])
            found = flash.gradients(mine, theirs, bias, problem.scale)
            for whole, span, more in zip((d_q, d_k, d_v), (rows, keys, keys), found, strict=True):
                whole[:, :, span] += more
    d_key = (-d_k[..., width] / problem.scale).sum_to_size(key.shape).to(key.dtype)
    found = (d_q[..., :width], d_k[..., :width], d_v[..., :v_dim])
    return *map(of_groups, found, given), torch.zeros_like(row), d_key
