"""Short rows that need gradients under autocast: scores and weights in bfloat16, once in memory
forward and once backward, instead of float32 copies for scale, bias, mask and softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.attend.kernels import by_head
from posenc.attend.kernels.cost import Cost
from posenc.attend.kernels.toeplitz_gradients import dense_gradients
from posenc.attend.problem import Problem
from posenc.numbers import native
from posenc.numbers.heads import for_every_head
from posenc.numbers.tracking import followed
from posenc.terms.dense import Dense

MOST_KEYS = 512
"""Up to this many keys, weights kept for the backward pass cost less than computing them again; it
is also the length of a row in short_rows.c."""
SOURCE = Path(__file__).with_suffix(".c")
FUNCTIONS = ("softmax", "softmax_backward")


def refuse(problem: Problem) -> str | None:
    if not (problem.needs_grad and problem.autocast and problem.q.device.type == "cpu"):
        return "it is for training under autocast on the CPU"
    if torch.get_autocast_dtype("cpu") != torch.bfloat16:
        return "it computes in bfloat16"
    if torch.float64 in (problem.q.dtype, problem.k.dtype, problem.v.dtype):
        return "autocast leaves float64 as it is"
    if problem.kv_len > MOST_KEYS:
        return f"it keeps the weights, and {problem.kv_len} keys are more than {MOST_KEYS}"
    if problem.term is not None and (
        not isinstance(problem.term, Dense) or problem.term.combine is not None
    ):
        return "it changes scores or values, which this kernel does not show"
    if problem.need_lse or problem.dropout_p:
        return "it has no log-sum-exp and no dropout"
    if followed(problem.q, problem.k, problem.v):
        return "a compiler, a trace, a transform or forward mode looks at plain operations"
    return None


def cost(problem: Problem) -> Cost:
    batch, heads = problem.q.shape[:2]
    scores = batch * heads * problem.q_len * problem.kv_len
    if by_head.compiled() is not None:
        held = by_head.held_bytes(batch, heads, problem.q_len, problem.kv_len)
    else:
        held = 2 * 2 * scores  # weights, and the gradient that takes the place of their own
    if problem.term is not None:
        held += 2 * 4 * scores // (1 if problem.q.shape[0] == 1 else 2)
    if not _is_causal_run(problem) and problem.mask is not None:
        held += scores
    return Cost("O(q_len * kv_len)", held)


def run(problem: Problem) -> tuple[Tensor, None]:
    heads = problem.q.shape[1]
    q, k, v = (t.to(torch.bfloat16) for t in (problem.q, problem.k, problem.v))
    shift, visible = problem.kv_len, None
    if _is_causal_run(problem):
        assert problem.mask_runs is not None
        shift = problem.mask_runs[0] - problem.mask_runs[1] - problem.first_key
    else:
        visible = problem.visible(0, problem.q_len)
    bias = None
    if problem.term is not None:
        assert isinstance(problem.term, Dense)
        with torch.autocast("cpu", enabled=False):
            keys = slice(problem.first_key, problem.first_key + problem.kv_len)
            bias = problem.term.values(slice(0, problem.q_len), keys).float()
        bias = bias.expand(-1, heads, problem.q_len, problem.kv_len)
    k, v = for_every_head(k, heads), for_every_head(v, heads)
    out = _Attention.apply(q, k, v, bias, visible, problem.scale, shift)
    return out.to(problem.q.dtype), None  # type: ignore[union-attr]


def _is_causal_run(problem: Problem) -> bool:
    """Whether the mask shows a query the keys up to its own position and nothing else is hidden."""
    mask = problem.mask
    plain = mask is not None and mask.exact and mask.causal and mask.window is None
    return plain and problem.mask_runs is not None


def _shape(
    scores: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float, shift: int
) -> tuple[native.Argument, ...]:
    """`Shape` of short_rows.c."""
    strides = ((0, 0, 0) if t is None else t.stride()[:3] for t in (bias, visible))
    return tuple(scores.shape), shift, *strides, float(scale)


def _softmax(scores: Tensor, bias: Tensor | None, visible: Tensor | None, scale, shift) -> None:
    """Scaled products become weights, in place."""
    library: Any = native.load(SOURCE, FUNCTIONS)
    if library is not None:
        bias, visible = (native.in_rows(t, scores.shape) for t in (bias, visible))
        shape = _shape(scores, bias, visible, scale, shift)
        return native.run(library.softmax, scores.shape[1], scores, bias, visible, *shape)
    rows, keys = scores.shape[-2:]
    hidden = _hidden(rows, keys, visible, shift)
    # A bias of 30 in bfloat16 would be off by a tenth.
    wide = scores.mul_(scale) if bias is None else torch.add(bias, scores, alpha=scale)
    if hidden is not None:
        wide.masked_fill_(hidden, torch.finfo(wide.dtype).min)
    torch.softmax(wide, -1, out=wide)
    if hidden is not None:
        wide.masked_fill_(hidden, 0)  # a row that sees no key gives zeros
    if wide is not scores:
        scores.copy_(wide)


def _hidden(rows: int, keys: int, visible: Tensor | None, shift: int) -> Tensor | None:
    if visible is not None:
        return ~visible
    if shift >= keys:
        return None
    return torch.ones(rows, keys, dtype=torch.bool).triu_(shift + 1)


def _softmax_backward(
    weights: Tensor, grad: Tensor, grad_bias: Tensor | None, scale: float, shift: int
) -> None:
    """The gradient of the weights becomes that of the products q . k, in place; that of the bias is
    added to `grad_bias`, (1 or batch, num_heads, rows, keys) in float32."""
    library: Any = native.load(SOURCE, FUNCTIONS)
    if library is not None:
        rows = None if grad_bias is None else grad_bias.expand(weights.shape)
        shape = _shape(weights, rows, None, scale, shift)
        heads = weights.shape[1]  # a bias of all sequences: one thread adds up a head's gradient
        return native.run(library.softmax_backward, heads, weights, grad, rows, *shape)
    torch.ops.aten._softmax_backward_data.out(grad, weights, -1, weights.dtype, grad_input=grad)
    if grad_bias is not None:
        wide = torch.float32
        grad_bias.add_(grad.sum(0, True, dtype=wide) if len(grad_bias) == 1 else grad.to(wide))
    grad.mul_(scale)


class _Attention(torch.autograd.Function):
    """softmax(scale * q k^T + bias) v from q, k, v (batch, num_heads, len, width) in bfloat16 and a
    bias (1 or batch, num_heads, q_len, kv_len) in float32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, visible: Tensor | None,
        scale: float, shift: int,
    ) -> Tensor:  # fmt: skip
        ctx.by_heads = by_head.compiled() is not None
        if ctx.by_heads:
            out, weights = by_head.attend(q, k, v, bias, visible, scale, shift)
        else:
            weights = q @ k.mT
            _softmax(weights, bias, visible, scale, shift)
            out = weights @ v
        ctx.save_for_backward(q, k, v, bias, visible, weights)
        ctx.scale, ctx.shift = scale, shift
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, visible, weights = ctx.saved_tensors
        weights = weights.contiguous()  # whoever kept them may give them back with other strides
        (grad,) = grads
        if torch.is_grad_enabled():  # a gradient of this gradient is asked for
            hidden = _hidden(q.shape[2], k.shape[2], visible, ctx.shift)
            dense = q.new_zeros(1, 1, 1, 1, dtype=torch.float32) if bias is None else bias
            hidden = torch.zeros_like(dense, dtype=torch.bool) if hidden is None else hidden
            inputs = (q, k, v, bias if bias is not None else dense)
            found = dense_gradients(inputs, dense, hidden, ctx.scale, grads)
            return *found[:3], None if bias is None else found[3], None, None, None
        needs_bias = ctx.needs_input_grad[3]
        grad_bias = bias.new_zeros(bias.shape) if needs_bias else None  # keys side by side
        if ctx.by_heads:
            found = by_head.gradients(q, k, v, weights, grad, grad_bias, ctx.scale, ctx.shift)
            return *found, grad_bias, None, None, None
        d_v = weights.mT @ grad
        d_scores = grad @ v.mT
        _softmax_backward(weights, d_scores, grad_bias, ctx.scale, ctx.shift)
        return d_scores @ k, d_scores.mT @ q, d_v, grad_bias, None, None, None
