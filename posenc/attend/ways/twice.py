"""Compute second derivatives, for implementations with their own backward pass."""

import torch
from torch import Tensor

from posenc.encodings.numbers.heads import grouped_matmul


def dense_gradients(
    inputs: tuple[Tensor, ...],
    bias: Tensor,
    hidden: Tensor,
    scale: float,
    grads: tuple[Tensor | None, ...],
) -> list[Tensor | None]:
    """Return the gradients of `inputs` (q, k, v and tensors of the bias), by dense operations,
    which can be differentiated again. `grads` are the gradients of the output and the
    log-sum-exp."""
    q, k, v = inputs[:3]
    scores = grouped_matmul(q.to(bias.dtype) * scale, k.to(bias.dtype).mT)
    scores = (scores + bias.masked_fill(hidden, 0)).masked_fill(hidden, torch.finfo(bias.dtype).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    outputs = grouped_matmul(weights, v.to(bias.dtype)).to(q.dtype), scores.logsumexp(-1)
    given = [(out, grad) for out, grad in zip(outputs, grads, strict=False) if grad is not None]
    wanted = [t for t in inputs if t.requires_grad]
    found = torch.autograd.grad(
        [out for out, _ in given],
        wanted,
        [grad for _, grad in given],
        create_graph=True,
        allow_unused=True,
    )
    remaining = iter(found)
    return [next(remaining) if t.requires_grad else None for t in inputs]
