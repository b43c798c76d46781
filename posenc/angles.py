"""cos and sin of position times frequency, right at any position an int64 can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal

import torch
from torch import Tensor

from posenc import frequencies

_RADIANS_PER_UNIT = 2 * math.pi / frequencies.TURN


class Angles:
    """cos and sin of p * inv_freq for integer or real positions p.

    The angle is reduced to a turn in 64-bit fixed point, where p * turns wraps for free, before
    anything is
    rounded: cos and sin are right to 1.5e-7 in float32 at every integer position up to 2^31, and to
    5e-7 up to 2^40. Real positions are split into a whole and a fractional part and are as exact as
    they are given.

    Only Python integers are kept, and a device's copy of them as int64: no cast of a module can
    round them.
    """

    def __init__(self, inv_freq: Sequence[Decimal | float]) -> None:
        self.inv_freq = tuple(inv_freq)
        self.turns = frequencies.turns(self.inv_freq)
        self._on_device: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.turns)

    def cos_sin(
        self, positions: Tensor, dtype: torch.dtype = torch.float32, factor: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """cos and sin times `factor`, each (*positions.shape, len(inv_freq)), in `dtype`."""
        angle = self.reduced(positions)
        cos, sin = angle.cos(), angle.sin()
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        return cos.to(dtype), sin.to(dtype)

    def reduced(self, positions: Tensor) -> Tensor:
        """The angle in radians modulo a turn, float64, within (-2 pi, 2 pi)."""
        units = self._turns_on(positions.device)
        if not positions.is_floating_point():
            return (positions.long()[..., None] * units).double() * _RADIANS_PER_UNIT
        whole = positions.double().floor()
        fraction = (positions.double() - whole)[..., None]
        inv_freq = torch.tensor(
            [float(f) for f in self.inv_freq], dtype=torch.float64, device=positions.device
        )
        angle = (whole.long()[..., None] * units).double() * _RADIANS_PER_UNIT
        return angle + torch.remainder(fraction * inv_freq, 2 * math.pi)

    def _turns_on(self, device: torch.device) -> Tensor:
        units = self._on_device.get(device)
        if units is None:
            units = torch.tensor(self.turns, dtype=torch.int64, device=device)
            # A tensor made while tracing is the tracer's own and must not outlive it.
            if type(units) is Tensor and not torch.compiler.is_compiling():
                self._on_device[device] = units
        return units
