"""Rotation of channel pairs as one operator of torch: one pass over x on CUDA and on the CPU.

A `torch.library` operator, since a pointer handed to a kernel is invisible to whoever traces.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

from posenc.kernels import rope_cpu


def takes(x: Tensor, cos: Tensor) -> bool:
    """Whether a fused kernel rotates x here; else plain operations do."""
    if x.device.type == "cuda":
        return _has_triton()
    return rope_cpu.takes(x, cos)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first 2 * pairs channels of x (batch, heads, len, head_dim) rotated, the rest as it is.

    cos and sin are (1, len, pairs) or (batch, 1, len, pairs).
    """
    return torch.ops.posenc.rotate.default(x, cos, sin, interleaved)


def _on_cuda(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    from posenc.kernels import rope_triton

    return rope_triton.rotate(x, cos, sin, interleaved=interleaved)


def _as_fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return torch.empty_like(x)


# Not torch.library.custom_op: its checks take longer than the rotation of a small tensor.
torch.library.define(
    "posenc::rotate", "(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor"
)
torch.library.impl("posenc::rotate", "CPU", rope_cpu.rotate)
torch.library.impl("posenc::rotate", "CUDA", _on_cuda)
torch.library.register_fake("posenc::rotate", _as_fake)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
