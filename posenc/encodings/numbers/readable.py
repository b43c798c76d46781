"""Read numbers of a tensor only if this neither breaks a trace nor waits for a device."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def inside_functorch_transform() -> bool:
    """Return True inside grad, jvp or vmap of torch.func, where numbers of tensors cannot be
    read."""
    return torch._C._are_functorch_transforms_active()  # torch has no public function for this


def inside_python_export() -> bool:
    """Return True inside torch.export with strict=False, which runs Python code on fake tensors."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_readable(t: Tensor) -> bool:
    """Return True if the numbers of t can be read at once: t is on the CPU, is no fake tensor, and
    is neither traced nor inside a transform of torch.func."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or inside_functorch_transform():  # type: ignore
        return False
    return type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"


def outside_inference_mode() -> AbstractContextManager:
    """Return a context in which tensors are made that a later backward pass can save, also within
    inference mode."""
    inside = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else nullcontext()


def extremes_if_readable(t: Tensor) -> tuple[float, float] | None:
    """Return the minimum and maximum of a tensor; None if it is empty, or if its numbers cannot be
    read without waiting for an accelerator or breaking a trace."""
    if not is_readable(t) or not t.numel():
        return None
    low, high = t.detach().aminmax()
    return low.item(), high.item()
