"""An encoding whose layers differ: each layer has its own parameters."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from posenc.encoding import PositionEncoding


class PerLayer(PositionEncoding):
    """One encoding per layer: layer i uses layers[i].

    Args:
        layers: the encoding of each layer; an encoding that appears twice is shared.

    Raises: ValueError if layers is empty.
    Source: the encodings it holds.
    """

    source = "the encodings of its layers"

    def __init__(self, layers: Sequence[PositionEncoding]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("PerLayer: needs the encoding of at least one layer, got none.")
        self.layers = nn.ModuleList(layers)
        self._ready: tuple[PositionEncoding, ...] | None = None
        self.places = tuple(sorted({place for e in layers for place in e.places}))  # type: ignore[misc]
        self.shift_invariant = all(e.shift_invariant for e in layers)
        self.permutation_invariant = all(e.permutation_invariant for e in layers)
        self.causal_only = any(e.causal_only for e in layers)
        self.cache_safe = all(e.cache_safe for e in layers)
        self.needs_raw_k = any(e.needs_raw_k for e in layers)
        self.max_positions = min(
            (e.max_positions for e in layers if e.max_positions is not None), default=None
        )
        self.num_axes = max(e.num_axes for e in layers)

    @classmethod
    def replicate(cls, encoding: PositionEncoding, num_layers: int) -> Self:
        """A copy of `encoding` with fresh parameters for each of num_layers layers."""
        layers = [copy.deepcopy(encoding) for _ in range(num_layers)]
        for layer in layers:
            layer.reset_parameters()
        return cls(layers)

    @property
    def num_parameters(self) -> int:
        return sum(e.num_parameters for e in dict.fromkeys(self._members()))

    def reset_parameters(self) -> None:
        for encoding in dict.fromkeys(self._members()):
            encoding.reset_parameters()

    def for_layer(self, index: int) -> PositionEncoding:
        return self._members()[index]

    def prepare(self, positions: Tensor, length: int | None = None) -> PerLayer:
        ready = {e: e.prepare(positions, length) for e in dict.fromkeys(self._members())}
        prepared = copy.copy(self)
        prepared._ready = tuple(ready[e] for e in self._members())
        return prepared

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Place 1 acts once per model: the first layer's encoding embeds."""
        return self.for_layer(0).embed(x, positions)

    def _members(self) -> tuple[PositionEncoding, ...]:
        return self._ready if self._ready is not None else tuple(self.layers)  # type: ignore[return-value]
