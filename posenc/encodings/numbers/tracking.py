"""Read numbers of a tensor only if this neither breaks a trace nor waits for a device."""

import torch
from torch import Tensor


def transformed() -> bool:
    """Return True inside grad, jvp or vmap of torch.func, where numbers of tensors cannot be read.
    torch has no public function for this."""
    return torch._C._are_functorch_transforms_active()


def free_ends(t: Tensor) -> tuple[float, float] | None:
    """Return the minimum and maximum of a tensor; None if it is empty, traced, transformed, or on
    an accelerator."""
    if torch.compiler.is_compiling() or transformed() or t.device.type != "cpu" or not t.numel():
        return None
    low, high = t.detach().aminmax()
    return low.item(), high.item()
