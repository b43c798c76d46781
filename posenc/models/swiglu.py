"""down(silu(gate(x)) * up(x)) under autocast: in one pass over blocks of tokens, or as two products
with one pass over the result of the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from posenc.attend.projection import HALF, joins, product, product_gradients, project
from posenc.models.norms import library
from posenc.numbers import native

SOURCE = Path(__file__).with_suffix(".c")
ROWS, BLOCK = 128, 32
"""As in swiglu.c and products.h: tokens done together, and what widths are multiples of."""
GROUP = 8 * ROWS
"""Tokens whose gradients of the weights are added up, by one thread, before those of others."""
MOST = 1 << 17
"""Weights of a layer up to which it was faster; with one and a half times as many, torch's products
are as fast."""


def swiglu(
    x: Float[Tensor, "*batch in_features"], gate: nn.Linear, up: nn.Linear, down: nn.Linear
) -> Float[Tensor, "*batch out_features"]:
    """down(silu(gate(x)) * up(x)).

    Source: Shazeer 2020, arXiv:2002.05202, equation 6.
    """
    fit = gate.bias is None and gate.weight.shape == up.weight.shape
    if fit and joins(x, gate, up, down) and _in_one_pass(x, gate, down):
        return _OnePass.apply(x, gate.weight, up.weight, down.weight)  # type: ignore[return-value]
    if fit and joins(x, gate, up) and library() is not None:
        hidden = _Gate.apply(x, gate.weight, up.weight)
    else:
        hidden = F.silu(gate(x)) * up(x)
    return project(hidden, down)[0]


def _in_one_pass(x: Tensor, gate: nn.Linear, down: nn.Linear) -> bool:
    """Whether the sizes are right, there are tokens enough for what the pass prepares and for every
    thread, and it was faster with sizes like these."""
    hidden, width = gate.weight.shape
    out = len(down.weight)
    tokens = x.numel() // width
    return (
        (x.shape[-1], down.weight.shape[1]) == (width, hidden)
        and tokens >= ROWS
        and tokens > GROUP * (torch.get_num_threads() - 1)
        and hidden * max(width, out) <= MOST
        and not any(size % BLOCK for size in (hidden, width, out))
        and native.load_if_suited(SOURCE) is not None
    )


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).to(HALF).contiguous()
        weights, down = torch.cat([gate.to(HALF), up.to(HALF)]), down.to(HALF).contiguous()
        both = flat.new_empty(len(flat), len(weights))
        out = flat.new_empty(*x.shape[:-1], len(down))
        ctx.sizes = (len(flat), flat.shape[1], len(gate), len(down), GROUP)
        ctx.save_for_backward(flat, weights, down, both)
        ctx.shape = x.shape
        given = flat, weights, down, both, out
        native.run(_library().forward, -(-len(flat) // ROWS), *given, ctx.sizes)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Whoever keeps them meanwhile may give them back with other strides.
        flat, weights, down, both = (t.contiguous() for t in ctx.saved_tensors)
        tokens, width, hidden, out, _ = ctx.sizes
        groups, wide = -(-tokens // GROUP), torch.float32
        d_x, d_weights, d_down = flat.new_empty(flat.shape, dtype=wide), None, None
        if any(ctx.needs_input_grad[1:]):
            d_weights = flat.new_empty(groups, 2 * hidden, width, dtype=wide)
            d_down = flat.new_empty(groups, out, hidden, dtype=wide)
        given = grad.contiguous(), flat, weights, down, both, d_x, d_weights, d_down
        native.run(_library().backward, groups, *given, ctx.sizes)
        d_x = d_x.view(ctx.shape)
        if d_weights is None or d_down is None:
            return d_x, None, None, None
        return d_x, *d_weights.sum(0).split(hidden), d_down.sum(0)


def _library() -> Any:
    return native.load_if_suited(SOURCE)


class _Gate(torch.autograd.Function):
    """silu(gate(x)) * up(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        both, flat, weight = product(x, (gate, up))
        ctx.save_for_backward(flat, weight, both)
        ctx.shape = x.shape
        out = both.new_empty(*x.shape[:-1], len(gate))
        native.run(library().swiglu, len(flat), both, out, len(gate))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        flat, weight, both = ctx.saved_tensors
        d_both, width = both.new_empty(both.shape), len(weight) // 2
        given = grad.contiguous(), both.contiguous(), d_both, width
        native.run(library().swiglu_backward, len(flat), *given)
        wanted = any(ctx.needs_input_grad[1:])
        d_x, d_weights = product_gradients(d_both, flat, weight, (width, width), wanted)
        return d_x.view(ctx.shape), *d_weights
