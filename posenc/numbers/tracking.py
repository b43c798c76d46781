"""Who watches a computation: autograd, forward mode, functorch, a dispatch mode, a compiler."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

_PLAIN = (Tensor, nn.Parameter)


def transformed() -> bool:
    """Whether a functorch transform (grad, jvp, vmap) is active."""
    return torch._C._are_functorch_transforms_active()


def free_ends(t: Tensor) -> tuple[float, float] | None:
    """The smallest and the largest number of a tensor; None where it has none, or where looking
    would wait for an accelerator, break a trace or meet a transform."""
    if torch.compiler.is_compiling() or transformed() or t.device.type != "cpu" or not t.numel():
        return None
    low, high = t.detach().aminmax()
    return low.item(), high.item()


def has_tangent(*tensors: Tensor) -> bool:
    """Whether one of them carries a tangent of forward-mode differentiation."""
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def followed(*tensors: Tensor) -> bool:
    """Whether something beside reverse mode looks at plain operations, or one of the tensors is of
    another kind, so that what C computes would be missed."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or transformed():
        return True
    if torch._C._len_torch_dispatch_stack():  # who counts, fakes or records each operation
        return True
    # Any parameter or state may carry a tangent.
    return forward_ad._current_level >= 0 or any(type(t) not in _PLAIN for t in tensors)


def watched() -> bool:
    """Whether anything may be watching, so that only plain operations out of place are right."""
    return torch.is_grad_enabled() or followed()
