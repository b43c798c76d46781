"""Linear layers that read the same input as one product, under autocast: x is rounded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from posenc.numbers.tracking import followed

HALF = torch.bfloat16


def project(
    x: Float[Tensor, "*batch in_features"], *layers: nn.Linear
) -> tuple[Float[Tensor, "*batch _"], ...]:
    """layer(x) for each of the layers.

    Under bfloat16 autocast on the CPU it is one product with all weights: x is rounded
    once, not once per layer, and so is its gradient.
    """
    if not joins(x, *layers):
        return tuple(layer(x) for layer in layers)
    biases = [] if layers[0].bias is None else [layer.bias for layer in layers]
    out = _Projection.apply(x, len(layers), *(layer.weight for layer in layers), *biases)
    sizes = [layer.out_features for layer in layers]
    return (out,) if len(layers) == 1 else out.split(sizes, -1)  # type: ignore[union-attr,return-value]


def joins(x: Tensor, *layers: nn.Module) -> bool:
    """Whether one product under autocast gives what these layers would, and nobody watches them."""
    if not (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == HALF
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, HALF)
    ):
        return False
    if not all(map(_is_plain, layers)):
        return False
    weights = [layer.weight for layer in layers]
    with_bias = {layer.bias is not None for layer in layers}
    if len(with_bias) > 1 or followed(x, *weights):  # type: ignore[arg-type]
        return False
    return all(w.dtype == torch.float32 and w.device == x.device for w in weights)


def _is_plain(layer: nn.Module) -> bool:
    """Whether it is torch's own linear layer: no adapter around it, no hook that wants it."""
    hooks = (
        layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks,
        layer._backward_pre_hooks,
    )  # fmt: skip
    changed = "forward" in vars(layer) or any(hooks)  # accelerate exchanges an instance's forward
    return type(layer) is nn.Linear and not changed and not _has_any_global_hook()


def product(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """x times all weights, (*batch, sum of out_features), and x and the weights as it took them:
    (tokens, in_features) and (sum of out_features, in_features)."""
    flat = x.reshape(-1, x.shape[-1]).to(HALF)
    weight = torch.cat([w.to(HALF) for w in weights])
    bias = torch.cat([b.to(HALF) for b in biases]) if biases else None
    return F.linear(flat, weight, bias).view(*x.shape[:-1], -1), flat, weight


def product_gradients(
    grad: Tensor, flat: Tensor, weight: Tensor, sizes: Sequence[int], wanted: bool
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """The gradient of x, (tokens, in_features), and that of each weight in float32 where they are
    wanted."""
    grad = grad.reshape(len(flat), -1)
    d_x = grad @ weight
    if not wanted:
        return d_x, [None] * len(sizes)
    return d_x, (grad.t() @ flat).float().split(list(sizes))


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *weights_and_biases: Tensor) -> Tensor:
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        out, flat, weight = product(x, weights, biases)
        ctx.save_for_backward(flat, weight)
        ctx.sizes, ctx.shape = [len(w) for w in weights], x.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        flat, weight = ctx.saved_tensors
        count, needed = len(ctx.sizes), ctx.needs_input_grad[2:]
        d_x, d_weights = product_gradients(grad, flat, weight, ctx.sizes, any(needed[:count]))
        d_biases: Sequence[Tensor] = ()
        if len(needed) > count:
            d_biases = grad.flatten(0, -2).sum(0, dtype=torch.float32).split(ctx.sizes)
        return d_x.view(ctx.shape), None, *d_weights, *d_biases
