"""Try an attention out with weights that are not zero, as trained ones are."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_TRIAL_STD = 0.02
"""Standard deviation of the random numbers; as usual for initial weights."""


@contextmanager
def without_zero_weights(module: nn.Module) -> Iterator[None]:
    """Give parameters that are zero throughout small random numbers inside of the block.

    Tables of relative positions, gates and last layers often begin as zeros. A trial with zeros
    would not show what the module computes once they are trained.
    """
    zero_parameters = [p for p in module.parameters() if _is_zero_throughout(p)]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in zero_parameters:
            noise = torch.randn(parameter.shape, generator=generator) * _TRIAL_STD
            parameter.copy_(noise)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter in zero_parameters:
                parameter.zero_()


def _is_zero_throughout(parameter: nn.Parameter) -> bool:
    """Return True if all numbers of a parameter are zero. False if it has none, holds integers, or
    cannot be written to: on the meta device, or made in inference mode."""
    is_writable = not parameter.is_meta and not parameter.is_inference()
    if not is_writable or not parameter.is_floating_point() or not parameter.numel():
        return False
    # One number is read first, because most parameters are large and begin with another.
    first_number = parameter.detach().flatten()[0]
    return not first_number.any() and not parameter.detach().any()
