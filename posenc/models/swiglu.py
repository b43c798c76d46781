"""silu(gate(x)) * up(x) as one product and one pass over its result, under autocast."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posenc.attend.projection import joins, product, product_gradients
from posenc.models.norms import library
from posenc.numbers import native


def swiglu(
    x: Float[Tensor, "*batch in_features"], gate: nn.Linear, up: nn.Linear
) -> Float[Tensor, "*batch ffn_dim"]:
    """silu(gate(x)) * up(x).

    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """
    if joins(x, gate, up) and gate.bias is None and library() is not None:
        return _SwiGLU.apply(x, gate.weight, up.weight)  # type: ignore[return-value]
    return F.silu(gate(x)) * up(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        both, flat, weight = product(x, (gate, up))
        ctx.save_for_backward(flat, weight, both)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        out = both.new_empty(*x.shape[:-1], len(gate))
        native.run(library().swiglu, len(flat), both, out, len(gate))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        flat, weight, both = ctx.saved_tensors
        d_both, width = torch.empty_like(both), len(weight) // 2
        given = grad.contiguous(), both, d_both, width
        native.run(library().swiglu_backward, len(flat), *given)
        wanted = any(ctx.needs_input_grad[1:])
        d_x, d_weights = product_gradients(d_both, flat, weight, (width, width), wanted)
        return d_x.to(ctx.dtype).view(ctx.shape), *d_weights
