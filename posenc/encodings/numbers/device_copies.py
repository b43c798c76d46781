"""Constants of a module, as Python numbers with a tensor for each device and dtype."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from posenc.encodings.numbers.readable import inside_functorch_transform


class Constants:
    """Hold constant numbers of an encoding, and copy them to each device once.

    A buffer would be rounded by `.to(bfloat16)`. A tensor made in each call would have to wait for
    its copy to the device.
    """

    def __init__(self, values: Sequence[float]) -> None:
        self.values = tuple(values)
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, other: Tensor) -> Tensor:
        """Return the numbers as a tensor (len,) in the dtype and on the device of `other`. Do not
        write to it: it is shared."""
        key = (other.device, other.dtype)
        plain = type(other) in (Tensor, nn.Parameter)
        if torch.compiler.is_compiling() or inside_functorch_transform() or not plain:
            # A tensor made while tracing must not be used after the trace or with fake tensors.
            return torch.tensor(self.values, dtype=other.dtype, device=other.device)
        if key not in self._copies:
            with torch.inference_mode(False):  # otherwise a later backward pass cannot save it
                made = torch.tensor(self.values, dtype=other.dtype, device=other.device)
            if type(made) is not Tensor:  # a mode such as FakeTensorMode made it, and is left soon
                return made
            self._copies[key] = made
        return self._copies[key]
