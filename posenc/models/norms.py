"""RMSNorm in one pass each way on the CPU, where torch reads the memory eight times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from posenc.numbers import native
from posenc.numbers.tracking import followed

SOURCE = Path(__file__).with_name("layers.c")
BLOCK = 512
"""Rows whose gradients of the weights are added up before those of other rows."""
FUNCTIONS = ("rms", "rms_backward", "swiglu", "swiglu_backward")


def library() -> Any:
    """layers.c, or None where there is no compiler."""
    return native.load(SOURCE, FUNCTIONS)


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis.

    The same module as torch's, with its parameters and results; training on the CPU takes about
    half the time, and a sixth where there is a C compiler.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """

    def forward(self, x: Float[Tensor, "*batch embed_dim"]) -> Float[Tensor, "*batch embed_dim"]:
        # In half types the sum of squares overflows or is coarse, and torch computes in float32.
        lean = x.device.type == "cpu" and x.dtype == self.weight.dtype and x.dtype.itemsize >= 4
        if not lean or followed(x, self.weight):
            return super().forward(x)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return _RMSNorm.apply(x, self.weight, eps)  # type: ignore[return-value]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32 and (lib := library()) is not None:
            x, weight = x.contiguous(), weight.contiguous()
            out, inverse = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
            native.run(lib.rms, inverse.numel(), x, weight, out, inverse, x.shape[-1], float(eps))
        else:
            norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            out = (x * inverse).mul_(weight)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        if x.dtype == torch.float32 and (lib := library()) is not None:
            given = (t.contiguous() for t in (grad, x, weight, inverse))
            return *_gradients(lib, *given), None
        width = x.shape[-1]
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, [width], torch.zeros_like(inverse), inverse, weight, None, [True, True, False]
        )
        # LayerNorm's kernel, even with a mean of zero, subtracts the gradient through the mean: add
        # it again.
        through_mean = (grad @ weight).div_(width).unsqueeze(-1)
        return grad_x.addcmul_(inverse, through_mean), grad_weight, None


def _gradients(
    lib: Any, grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    rows, width = inverse.numel(), x.shape[-1]
    blocks = -(-rows // BLOCK)
    grad_x, sums = torch.empty_like(x), weight.new_empty(blocks, width)
    given = grad, x, weight, inverse, grad_x, sums
    native.run(lib.rms_backward, blocks, *given, width, rows, BLOCK)
    return grad_x, sums.sum(0)
