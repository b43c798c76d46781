"""Numbers that a module keeps as Python values, with a copy for each device that asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from posenc.encodings.numbers.tracking import transformed


class Constants:
    """Fixed numbers of an encoding: no cast of the module can round them, and no call waits for a
    device to receive them twice.

    A buffer would follow `.to(bfloat16)`; a tensor made per call is a blocking copy to the device.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(values)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """The numbers, (len,), in the dtype and on the device of `other`."""
        key = (other.device, other.dtype)
        if (
            torch.compiler.is_compiling()
            or transformed()
            or type(other) not in (Tensor, nn.Parameter)
        ):
            # A tensor made while tracing must not outlive the trace, nor meet a fake one.
            return torch.tensor(self.values, dtype=other.dtype, device=other.device)
        if key not in self._copies:
            with torch.inference_mode(False):  # else a later backward pass could not save it
                made = torch.tensor(self.values, dtype=other.dtype, device=other.device)
            if type(made) is not Tensor:
                return made
            self._copies[key] = made
        return self._copies[key]
