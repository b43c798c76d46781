"""Compute gradients of attention with a bias by distance, by strips of queries.

The forward pass is, for query i and key j, with one row of bias for each head:

    s[i, j] = scale q[i] . k[j] + row[q_len - 1 - i + j]
    lse[i]  = log(sum over j of exp(s[i, j]))
    p[i, j] = exp(s[i, j] - lse[i])
    out[i]  = sum over j of p[i, j] v[j]

From the gradients of out (`grad`) and of lse (`grad_lse`) follow those of the scores:

    d_s[i, j] = p[i, j] (grad[i] . v[j] - mean[i] + grad_lse[i])
    mean[i]   = sum over j of p[i, j] grad[i] . v[j]  =  grad[i] . out[i]

torch's own backward kernel computes d_s without grad_lse, and from it the gradients of q, k and v,
but none of a bias. grad_lse gets in by one more channel: with grad' = (grad, 1), v' = (v, 0) and
out' = (out, -grad_lse), grad' . v' stays as it is and grad' . out' = mean - grad_lse.

The gradient of the row is computed here. Its entry e is the sum of d_s over the diagonal
q_len - 1 - i + j = e. Two things save work and keep it exact:

Entries of one parameter. Far distances may share one parameter of each head, as T5's last bucket
does: the first `num_constant` entries of the row. Without grad_lse, the sum of d_s[i, j] over j is
mean[i] - mean[i] = 0 for each query, because weights sum to 1. So the gradients of all entries sum
to 0, those of the first `num_constant` ones sum to minus the sum of the others, and only pairs that
read the others are computed. The blocks in which they are computed also have some pairs that read
the first entries. Incomplete sums of these cancel: the difference above subtracts them, and the
gradient of the parameter, which is the sum over its entries, adds them again.

When this is too coarse. That sum is a difference of larger numbers: if it is less than 1e-4 of the
sum of their sizes, rounding would be much of it. The gradient is then computed again from all
pairs, with num_constant = 0.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from posenc.attend.ways import flash
from posenc.attend.ways.second_derivatives import dense_gradients
from posenc.attend.ways.strips_forward import Strip, StripPlan, forward, reversed_bias
from posenc.encodings.numerics.precision import without_autocast
from posenc.encodings.numerics.tensor_views import repeat_kv_heads

ROWS_AT_ONCE = 128
"""Number of queries whose scores are materialized at once."""
MAX_SCORES_BYTES = 2 * 2**20
"""Maximum bytes of these scores."""
KEYS_AT_ONCE = 4096
"""Number of keys per call of torch's backward kernel, which returns copies."""


class RowEntries(NamedTuple):
    """Hold facts about the entries of the bias by falling distance, of which there are q_len +
    kv_len - 1 for each head."""

    num_constant: int
    """Number of first entries that are one parameter of each head."""
    visible_end: int
    """Index of the first entry that the mask hides. It hides all entries from there on."""


class StripsAttention(torch.autograd.Function):
    """Attend by strips, without materializing the scores of all pairs in the backward pass.

    Inputs: q (batch, num_heads, q_len, width), k and v (batch, num_kv_heads, kv_len, ...), the bias
    by falling distance (num_heads, q_len + kv_len - 1), scale, plan and entries. Outputs: the
    output and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        row: Tensor,
        scale: float,
        plan: StripPlan,
        entries: RowEntries,
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, row, scale, plan)
        # A query without keys: the backward pass gives weights exp(-inf - 0) = 0, not NaN.
        ctx.save_for_backward(q, k, v, row, out, lse.masked_fill(lse == -torch.inf, 0))
        ctx.scale = scale
        ctx.plan = plan
        ctx.entries = entries
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, row, out, lse = ctx.saved_tensors
        grad, grad_lse = grads
        if torch.is_grad_enabled():  # for second derivatives
            bias = row.unfold(1, k.shape[2], 1).flip(1)
            return *dense_gradients((q, k, v, row), bias, ctx.scale, grads), None, None, None
        if grad is None:
            grad = torch.zeros_like(out)
        row = row.contiguous()
        saved = _prepare_saved(q, k, v, out, lse, grad, grad_lse, row.dtype)
        d_row = None
        with without_autocast(q.device):  # backward may be called inside it
            if ctx.needs_input_grad[3]:
                d_row = _row_gradient(saved, row, ctx.scale, ctx.plan, ctx.entries)
            d_q, d_k, d_v = _input_gradients(saved, row, ctx.scale, ctx.plan)
        return (
            sum_head_groups(d_q[..., : q.shape[-1]], q),
            sum_head_groups(d_k[..., : k.shape[-1]], k),
            sum_head_groups(d_v[..., : v.shape[-1]], v),
            d_row,
            None,
            None,
            None,
        )


class SavedForBackward(NamedTuple):
    """Hold tensors that the backward pass reads, with as many heads as the queries and all of one
    width: q, out and grad (batch, num_heads, q_len, width), k and v (batch, num_heads, kv_len,
    width), lse and grad_lse (batch, num_heads, q_len)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None

    def select_heads(self, head_slice: slice) -> "SavedForBackward":
        """Return the tensors of these heads only."""
        return SavedForBackward(*(None if t is None else t[:, head_slice] for t in self))  # type: ignore[arg-type]

    def reversed_rows(self, row_slice: slice) -> flash.QueryRows:
        """Return the tensors of some queries, in reverse order, as `reversed_bias` has their
        bias."""
        return flash.QueryRows(
            grad=self.grad[:, :, row_slice].flip(2),
            q=self.q[:, :, row_slice].flip(2),
            out=self.out[:, :, row_slice].flip(2),
            lse=self.lse[:, :, row_slice].flip(2),
        )


def _prepare_saved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    dtype: torch.dtype,
) -> SavedForBackward:
    """Return the tensors for the backward pass, with as many heads as q and of one width. A
    gradient of the log-sum-exp (grad_lse) becomes one more channel of grad, v and out, as the head
    of this file explains."""
    k = repeat_kv_heads(k, q.shape[1])
    v = repeat_kv_heads(v, q.shape[1])
    if grad_lse is not None:
        q, k, v, grad, out = (t.to(dtype) for t in (q, k, v, grad, out))
        grad = F.pad(grad, (0, 1), value=1)
        out = torch.cat([out, -grad_lse[..., None]], -1)
    q, k, v, grad, out = flash.pad_to_same_width(q, k, v, grad, out)
    return SavedForBackward(q, k, v, grad, out, lse, grad_lse)


def sum_head_groups(grad: Tensor, t: Tensor) -> Tensor:
    """Return the gradient of t, (batch, heads of t, len, width) in t's dtype: the sum of `grad`
    (batch, num_heads, len, width) over the query heads that share a head of t."""
    if grad.shape[1] != t.shape[1]:
        grad = grad.unflatten(1, (t.shape[1], -1)).sum(2)
    return grad.to(t.dtype)


def _input_gradients(
    saved: SavedForBackward, row: Tensor, scale: float, plan: StripPlan
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by torch's own backward kernel, in the dtype of `row`, the
    bias by falling distance."""
    d_q = torch.zeros_like(saved.q, dtype=row.dtype)
    d_k = torch.zeros_like(saved.k, dtype=row.dtype)
    d_v = torch.zeros_like(saved.v, dtype=row.dtype)
    for head_slice, _, groups in plan:
        saved_of_heads = saved.select_heads(head_slice)
        parts = [part for group in groups for part in group.all_parts()]
        for part in parts:
            rows = saved_of_heads.reversed_rows(part.row_slice())
            for piece in _split_keys(part):
                k = saved_of_heads.k[:, :, piece.key_slice()]
                v = saved_of_heads.v[:, :, piece.key_slice()]
                bias = reversed_bias(row[head_slice], saved.q.shape[2], piece)
                piece_d_q, piece_d_k, piece_d_v = flash.gradients(rows, (k, v), bias, scale)
                d_q[:, head_slice, piece.row_slice()] += piece_d_q.flip(2)
                d_k[:, head_slice, piece.key_slice()] += piece_d_k
                d_v[:, head_slice, piece.key_slice()] += piece_d_v
                del piece_d_q, piece_d_k, piece_d_v  # free their memory before the next piece
    return d_q, d_k, d_v


def _split_keys(part: Strip) -> Iterator[Strip]:
    """Yield a strip (queries and the keys to which they attend) in pieces of at most KEYS_AT_ONCE
    keys."""
    for kv_start in range(part.kv_start, part.kv_stop, KEYS_AT_ONCE):
        kv_stop = min(kv_start + KEYS_AT_ONCE, part.kv_stop)
        yield part._replace(kv_start=kv_start, kv_stop=kv_stop)


def _row_gradient(
    saved: SavedForBackward, row: Tensor, scale: float, plan: StripPlan, entries: RowEntries
) -> Tensor:
    """Return the gradient of the bias by falling distance, (num_heads, q_len + kv_len - 1). All
    sums have a fixed order, so results are reproducible bit for bit. The head of this file derives
    it."""
    # With grad_lse the gradients of a query's scores do not sum to 0, and weights from vectors in
    # 16 bits do not sum to 1 closely enough.
    sums_to_zero = saved.grad_lse is None and saved.q.dtype == row.dtype
    if entries.num_constant == 0 or not sums_to_zero:
        return _sums_along_diagonals(saved, row, scale, plan, begin=0, end=entries.visible_end)

    d_row = _sums_along_diagonals(
        saved, row, scale, plan, begin=entries.num_constant, end=entries.visible_end
    )
    # This subtracts the incomplete sums of the constant entries, too. They cancel: autograd adds up
    # the gradients of all constant entries, and so adds the same sums again.
    constant_gradient = -d_row.sum(-1)
    # In float32, terms of d_row have relative errors near 1e-7: a sum of 1e-4 of their size keeps
    # three digits. 1e-4 is chosen.
    is_too_coarse = constant_gradient.abs() < 1e-4 * d_row.abs().sum(-1)
    if bool(is_too_coarse.any()):
        return _sums_along_diagonals(saved, row, scale, plan, begin=0, end=entries.visible_end)
    # One of the constant entries gets the gradient of all of them: they are one parameter.
    d_row[:, entries.num_constant - 1] += constant_gradient
    return d_row


def _sums_along_diagonals(
    saved: SavedForBackward, row: Tensor, scale: float, plan: StripPlan, begin: int, end: int
) -> Tensor:
    """Return, for each entry of the bias by falling distance, the sum of the gradients of the
    scores that read it: (num_heads, q_len + kv_len - 1). Only sums of entries [begin, end) are
    complete."""
    batch, _, q_len, _ = saved.q.shape
    d_row = torch.zeros_like(row)
    most_keys = min(saved.k.shape[2], end - begin + ROWS_AT_ONCE)
    head_bytes = batch * ROWS_AT_ONCE * most_keys * row.element_size()
    heads_at_once = max(1, MAX_SCORES_BYTES // max(1, head_bytes))
    for head_slice, _, groups in plan:
        strips = [strip for group in groups for strip in group.strips]
        for first_head in range(head_slice.start, head_slice.stop, heads_at_once):
            slice_of_call = slice(first_head, min(first_head + heads_at_once, head_slice.stop))
            saved_of_heads = saved.select_heads(slice_of_call)
            for strip in strips:
                for q_start in range(strip.q_start, strip.q_stop, ROWS_AT_ONCE):
                    q_stop = min(q_start + ROWS_AT_ONCE, strip.q_stop)
                    part = strip._replace(q_start=q_start, q_stop=q_stop)
                    part = part.restrict_to_entries(q_len, begin, end)
                    if part.kv_start >= part.kv_stop:
                        continue
                    bias = reversed_bias(row[slice_of_call], q_len, part)
                    # From entry 0 on, a strip has all keys that its queries see; else only some.
                    if begin == 0:
                        d_scores = _complete_score_gradients(saved_of_heads, bias, scale, part)
                    else:
                        d_scores = _partial_score_gradients(saved_of_heads, bias, scale, part)
                    _add_diagonals(d_scores.sum(0), d_row[slice_of_call, part.first_entry(q_len) :])
    return d_row


def _partial_score_gradients(
    saved: SavedForBackward, bias: Tensor, scale: float, strip: Strip
) -> Tensor:
    """Return the gradients of a strip's scores, with queries in reverse order, where queries may
    see keys outside of the strip, too.

    Softmax's gradient is weight * (d_weight - mean of d_weight by weight), over all keys of a
    query. The strip has only some of them, so weights come from the saved log-sum-exp, and the mean
    is grad . out, which the forward pass has summed over all.

    saved: tensors of the heads of this strip. bias: (1, heads, rows, keys).
    """
    rows, scores, d_weights = _scores_and_weight_gradients(saved, bias, scale, strip)
    mean = (rows.grad * rows.out).sum(-1, keepdim=True)
    scores.sub_(rows.lse[..., None])
    # exp is slow where it gives tiny numbers, below about exp(-87). exp(-80) is 2e-35: no weight.
    scores.clamp_(min=-80)
    weights = scores.exp_()
    return d_weights.sub_(mean).mul_(weights)


def _complete_score_gradients(
    saved: SavedForBackward, bias: Tensor, scale: float, strip: Strip
) -> Tensor:
    """Return the gradients of a strip's scores, with queries in reverse order, whose queries see no
    keys outside of the strip.

    Here weights are normalised within the strip, because far from the start the log-sum-exp is too
    coarse for weights that sum to 1. The mean of d_weight uses the same weights, so that terms
    common to all keys cancel.
    """
    _, scores, d_scores = _scores_and_weight_gradients(saved, bias, scale, strip)
    weights = torch.softmax(scores, -1)
    sees_no_key = bias.amax(-1, keepdim=True) == -torch.inf
    if bool(sees_no_key.any()):
        weights.masked_fill_(sees_no_key, 0)
    d_scores.mul_(weights)
    mean = d_scores.sum(-1, keepdim=True)
    d_scores.addcmul_(weights, mean, value=-1)
    if saved.grad_lse is not None:
        grad_lse = saved.grad_lse[:, :, strip.row_slice(), None].flip(2).to(bias.dtype)
        d_scores.addcmul_(weights, grad_lse)
    return d_scores


def _scores_and_weight_gradients(
    saved: SavedForBackward, bias: Tensor, scale: float, strip: Strip
) -> tuple[flash.QueryRows, Tensor, Tensor]:
    """Return three things, in the dtype of the bias and with queries in reverse order: what is
    saved of a strip's queries, its scores, and the gradients of its attention weights. Scores and
    gradients are (batch, heads, rows, keys)."""
    rows = flash.QueryRows(*(t.to(bias.dtype) for t in saved.reversed_rows(strip.row_slice())))
    k = saved.k[:, :, strip.key_slice()].to(bias.dtype)
    v = saved.v[:, :, strip.key_slice()].to(bias.dtype)
    scores = ((rows.q * scale) @ k.mT).add_(bias)
    return rows, scores, rows.grad @ v.mT


def _add_diagonals(d_scores: Tensor, d_row: Tensor) -> None:
    """Add the gradients of a strip's scores, in place, to the gradient of the bias by falling
    distance. Score (i, j) has read its entry i + j, so d_row[h, i + j] += d_scores[h, i, j].

    d_scores: (num_heads, rows, keys), with queries in reverse order.
    d_row: (num_heads, at least rows + keys - 1), from the first entry on that the strip read.
    """
    # Row i of the buffer is row i of d_scores shifted right by i, so diagonals become columns.
    num_heads, num_rows, num_keys = d_scores.shape
    sheared = d_scores.new_zeros(num_heads, num_rows, num_rows + num_keys)
    strides = (num_rows * (num_rows + num_keys), num_rows + num_keys + 1, 1)
    sheared.as_strided((num_heads, num_rows, num_keys), strides).copy_(d_scores)
    d_row[:, : num_rows + num_keys - 1] += sheared.sum(1)[:, :-1]
