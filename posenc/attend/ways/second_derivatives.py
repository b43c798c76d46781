"""Differentiate attention by torch's kernels twice: their backward passes have no derivative.

Autograd says only in the backward pass whether its results will be differentiated again: it then
runs with grad mode enabled (create_graph=True). Gradients are computed by dense operations there,
and by the kernels otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc.attend.problem import Problem
from posenc.encodings.numerics.precision import at_least_float32, without_autocast
from posenc.encodings.numerics.tensor_views import grouped_matmul


def make_twice_differentiable(problem: Problem, out: Tensor) -> Tensor:
    """Return `out`, the output of torch's kernel for a problem without a term, with the same
    numbers, such that its gradients can be differentiated again."""
    # torch.compile offers no second derivatives anyway.
    if not out.requires_grad or torch.compiler.is_compiling():
        return out
    # Only these, and not the problem: the function below lives as long as the graph, and would keep
    # q, k and v in memory after a backward pass has freed them.
    mask = problem.mask
    batch, num_heads, q_len = problem.q.shape[:3]
    kv_len = problem.kv_len
    device = problem.q.device

    def make_visible() -> Tensor | None:
        """Return True for visible pairs, to be broadcast to the scores; None if all are visible."""
        return None if mask is None else mask.rows(batch, num_heads, 0, q_len, kv_len, device)

    return _TwiceDifferentiable.apply(  # type: ignore[return-value]
        problem.q, problem.k, problem.v, out, problem.scale, make_visible
    )


class _TwiceDifferentiable(torch.autograd.Function):
    """Return `out` unchanged. In a usual backward pass its gradient goes to `out`, and so to the
    backward pass of the kernel. If gradients will be differentiated again, it goes to q, k and v
    instead, by dense operations.

    make_visible: function that returns the mask of all pairs, True for visible ones, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        scale: float,
        make_visible: Callable[[], Tensor | None],
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        ctx.make_visible = make_visible
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            # The whole gradient goes to the fourth input, `out`.
            return None, None, None, grads[0], None, None
        q, k, v = ctx.saved_tensors
        with without_autocast(q.device):  # backward may be called inside it
            visible = ctx.make_visible()
            bias = q.new_zeros((), dtype=at_least_float32(q.dtype))
            if visible is not None:
                bias = bias.expand(visible.shape).masked_fill(~visible, -torch.inf)
            return *dense_gradients((q, k, v), bias, ctx.scale, grads), None, None, None


def dense_gradients(
    inputs: tuple[Tensor, ...], bias: Tensor, scale: float, grads: tuple[Tensor | None, ...]
) -> list[Tensor | None]:
    """Return the gradients of `inputs` by dense operations, which can be differentiated again; None
    for each input that needs none.

    inputs: q, k and v, and then tensors from which `bias` was computed.
    bias: added to the scores; -inf for hidden pairs.
    grads: the gradients of the output and of the log-sum-exp, as far as the caller has both.
    """
    q, k, v = inputs[:3]
    dtype = bias.dtype
    is_hidden = bias == -torch.inf
    # Least scores instead of -inf: a row without a visible key would have NaN as its gradient.
    scores = grouped_matmul(q.to(dtype) * scale, k.to(dtype).mT) + bias.masked_fill(is_hidden, 0)
    scores = scores.masked_fill(is_hidden, torch.finfo(dtype).min)
    weights = scores.softmax(-1).masked_fill(is_hidden, 0)
    out = grouped_matmul(weights, v.to(dtype))
    lse = scores.logsumexp(-1)

    results = []
    grads_of_results = []
    # Not strict: some callers return no log-sum-exp, and so have one gradient only.
    for result, grad in zip((out, lse), grads, strict=False):
        if grad is not None:
            results.append(result)
            grads_of_results.append(grad.to(result.dtype))
    tracked_inputs = [t for t in inputs if t.requires_grad]
    gradients = iter(
        torch.autograd.grad(
            results, tracked_inputs, grads_of_results, create_graph=True, allow_unused=True
        )
    )
    return [next(gradients) if t.requires_grad else None for t in inputs]
