"""Rotation of channel pairs as one operator of torch: one pass over x on CUDA and on the CPU.

A `torch.library` operator, since a pointer handed to a kernel is invisible to whoever traces.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from posenc.queries_keys.rotation import cpu as rope_cpu


def takes(xs: Sequence[Tensor], cos: Tensor) -> bool:
    """Whether a fused kernel rotates these here; else plain operations do, and say what does not
    fit: a kernel would read beyond the tables."""
    if not all(_fits(x, cos) for x in xs):
        return False
    if xs[0].device.type == "cuda":
        return _has_triton()
    return rope_cpu.takes(xs, cos)


def _fits(x: Tensor, cos: Tensor) -> bool:
    batches = (1, x.shape[0]) if cos.ndim == 4 else (1,)
    return (
        x.ndim == 4
        and cos.shape[-2] == x.shape[2]
        and cos.shape[0] in batches
        and 2 * cos.shape[-1] <= x.shape[-1]
    )


def rotate(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    """The first 2 * pairs channels of one or two tensors (batch, heads, len, head_dim) of the same
    tokens rotated, the rest as it is.

    cos and sin are (1, len, pairs) or (batch, 1, len, pairs).
    """
    return torch.ops.posenc.rotate.default(xs, cos, sin, interleaved)


def _on_cpu(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    return [rope_cpu.rotate(x, cos, sin, interleaved) for x in xs]


def _on_cuda(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    from posenc.queries_keys.rotation import triton_kernel as rope_triton

    return rope_triton.rotate(xs, cos, sin, interleaved=interleaved)


def _as_fake(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, interleaved: bool) -> list[Tensor]:
    return [torch.empty_like(x) for x in xs]


# Not torch.library.custom_op: its checks take longer than the rotation of a small tensor.
torch.library.define(
    "posenc::rotate", "(Tensor[] xs, Tensor cos, Tensor sin, bool interleaved) -> Tensor[]"
)
torch.library.impl("posenc::rotate", "CPU", _on_cpu)
torch.library.impl("posenc::rotate", "CUDA", _on_cuda)
torch.library.register_fake("posenc::rotate", _as_fake)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
