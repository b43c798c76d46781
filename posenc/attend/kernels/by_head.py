"""Attention in bfloat16 by one pass of C over each head, on processors that multiply bfloat16 in
vectors; docs/performance.md has what it and torch's kernel took on one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.attend.kernels import sdpa, split, split_rows, toeplitz
from posenc.attend.kernels.cost import Cost
from posenc.attend.problem import Problem
from posenc.numbers import native
from posenc.numbers.tracking import followed

SOURCE = Path(__file__).with_suffix(".c")
BLOCK = 32
"""As in products.h: rows and keys are filled up to a multiple of it."""
FEW = 8
"""Up to this many queries, reading keys and values takes most of the time, whoever does it."""
MOST = 1 << 14
"""Keys up to which it was measured, 7 MB of its own a thread with heads of 64."""


def compiled() -> Any:
    """by_head.c, or None where there is no compiler, or the processor is not one for it."""
    return native.load_if_suited(SOURCE)


def refuse(problem: Problem) -> str | None:
    if followed(problem.q, problem.k, problem.v):
        return "a compiler, a trace, a transform or forward mode looks at plain operations"
    if problem.q.device.type != "cpu" or problem.product_dtype != torch.bfloat16:
        return "it computes in bfloat16, on the CPU"
    if problem.needs_grad:
        return "it has no gradients of its own; short_rows has, with its help"
    if problem.dropout_p:
        return "only reference and blockwise apply dropout"
    if problem.q_len <= FEW:
        return "few queries are bound by memory"
    if problem.kv_len > MOST:
        return f"its memory grows with the keys, and {problem.kv_len} are more than {MOST}"
    why_not = toeplitz.refuse(problem)
    if why_not and not _by_key(problem):
        return why_not
    if compiled() is None:
        return "no compiler here, or a processor without bfloat16 in vectors, or with tiles of it"
    return None


def cost(problem: Problem) -> Cost:
    batch, heads, rows, _ = problem.q.shape
    keys, width = _filled(problem.kv_len), problem.q.shape[3] + problem.v.shape[3]
    own = (6 * BLOCK + 2 * width) * keys * _threads(batch * heads)
    window = problem.mask is not None and problem.mask.window is not None
    added = 0
    if toeplitz.refuse(problem):
        added = 4 * batch * heads * keys
    elif problem.term is not None or window:
        added = 3 * 4 * heads * (rows + keys)
    rounded = [t for t in (problem.q, problem.k, problem.v) if t.dtype != torch.bfloat16]
    copies = 2 * sum(t.numel() for t in rounded)
    copies += 2 * problem.q.numel() if rounded else 0  # the output, before it is widened
    return Cost(sdpa.visible_time(problem), own + added + copies)


def _by_key(problem: Problem) -> bool:
    """Whether the term adds a number for each key, besides what all keys of a query share."""
    apart = split.refuse(problem) is None and sdpa.is_plain_causal(problem)
    return apart and problem.q_len <= split_rows.HALF_ROWS


def run(problem: Problem) -> tuple[Tensor, Tensor | None]:
    first, last = problem.reach(0, problem.q_len)  # what nobody sees may hold anything, NaN too
    q, k, v = (t.to(torch.bfloat16) for t in (problem.q, problem.k, problem.v))
    k, v = k[:, :, first:last], v[:, :, first:last]
    mask, heads, rows, shift = problem.mask, problem.q.shape[1], problem.q_len, problem.kv_len
    if mask is not None:
        assert problem.mask_runs is not None
        own = problem.mask_runs[0] - problem.mask_runs[1] - first  # the first query's own key
        ahead = 0 if mask.causal or mask.window is None else mask.window - 1
        shift = own + ahead if mask.causal or mask.window is not None else shift
    bias, begin, base = _NOTHING, None, None
    if toeplitz.refuse(problem):
        row, key = split.terms(problem)
        base = row[..., -1:]  # sums of many gates are large, and their differences are not
        numbers = (base - key).float().expand(len(q), heads, -1).contiguous()
        base = row - base
        bias = numbers, (*numbers.stride()[:2], 0)
    elif problem.term is not None or (mask is not None and mask.window is not None):
        table = toeplitz.falling_bias(problem).float().expand(heads, -1)[:, first:].contiguous()
        # Row i of the bias begins `rows - 1 - i` numbers into it: a stride that torch has not.
        bias = table.data_ptr() + 4 * (rows - 1), (0, table.stride(0), -1)
        if table[:, 0].amin() == -torch.inf:
            begin = (table > -torch.inf).long().argmax(-1)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if problem.need_lse else None
    out = _forward(q, k, v, bias, None, begin, None, lse, problem.scale, shift)
    if lse is not None and base is not None:
        lse += base
    return out.to(problem.q.dtype), lse


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float,
    shift: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T + bias) v, and the weights for the backward pass."""
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    bias, visible = (native.in_rows(t, (batch, heads, rows, keys)) for t in (bias, visible))
    weights = q.new_empty(batch, heads, _filled(rows), _filled(keys))
    out = _forward(q, k, v, _place(bias), visible, None, weights, None, scale, shift)
    return out, weights


def attend_with(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T + bias) v of a bias (batch, num_heads, q_len, kv_len) in float32, -inf
    where a key is hidden; and the log-sum-exp."""
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    rows = native.in_rows(bias, bias.shape)
    return _forward(q, k, v, _place(rows), None, None, None, lse, scale, k.shape[2]), lse


def gradients(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, grad: Tensor, grad_bias: Tensor | None,
    scale: float, shift: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Those of q, k and v; that of the bias, (1 or batch, heads, rows, keys) in float32, is added
    to `grad_bias`."""
    q, k, v, grad = map(_side_by_side, (q, k, v, grad))
    bias = _place(None if grad_bias is None else grad_bias.expand(*q.shape[:3], k.shape[2]))
    found = _new(q, q.shape[3]), _new(k, k.shape[3]), _new(v, v.shape[3])
    shape = _shape(q, k, v, grad, bias, None, scale, shift)
    # A bias for all rows of the batch adds up its gradient in one thread.
    given = q, k, v, weights, grad, *found, bias[0]
    native.run(compiled().attend_backward, q.shape[1], *given, *shape)
    return found


def held_bytes(batch: int, heads: int, rows: int, keys: int) -> int:
    """Most memory held at once beyond inputs, output and gradients by `attend` and `gradients`: the
    weights, and each thread's own of one head, with the gradient of its products."""
    scores = 2 * _filled(rows) * _filled(keys)
    return scores * (batch * heads + 2 * _threads(heads))


_Place = tuple[torch.Tensor | int | None, tuple[int, ...]]
"""A tensor or where it begins, and its strides of batch, head and row."""
_NOTHING: _Place = (None, (0, 0, 0))


def _place(t: Tensor | None) -> _Place:
    return _NOTHING if t is None else (t, t.stride()[:3])


def _shape(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None, bias: _Place, visible: Tensor | None,
    scale: float, shift: int,
) -> tuple[native.Argument, ...]:  # fmt: skip
    """`Shape` of by_head.c."""
    places = [*map(_place, (q, k, v, grad)), bias, _place(visible)]
    batch, heads, rows, width = q.shape
    sizes = batch, heads, heads // k.shape[1], rows, k.shape[2], width, v.shape[3], shift
    return sizes, *(strides for _, strides in places), float(scale)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: _Place, visible: Tensor | None, begin: Tensor | None,
    weights: Tensor | None, lse: Tensor | None, scale: float, shift: int,
) -> Tensor:  # fmt: skip
    """The output; `weights` and `lse` are filled in. `begin` is as in by_head.c."""
    q, k, v = map(_side_by_side, (q, k, v))
    out = _new(q, v.shape[3])
    shape = _shape(q, k, v, None, bias, visible, scale, shift)
    given = q, k, v, bias[0], visible, begin, weights, out, lse
    native.run(compiled().attend, q.shape[0] * q.shape[1], *given, *shape)
    return out


def _new(like: Tensor, width: int) -> Tensor:
    """(batch, heads, len, width), laid out as (batch, len, heads, width): so the projections beside
    it need no copy."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _filled(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _threads(items: int) -> int:
    return min(torch.get_num_threads(), items)
