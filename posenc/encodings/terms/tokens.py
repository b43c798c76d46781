"""Queries or keys of an attention: the vectors, positions and states of their tokens."""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from posenc.positions import Positions, as_range, as_tensor


class Tokens:
    """Hold the queries or the keys of one attention. A slice selects tokens.

    Args:
        x: vectors (batch, heads, len, width), not yet transformed by the encoding. Vectors of keys
            that `term` gets have as many heads as those of queries; they are None unless the
            encoding claims needs_raw_k.
        positions: (len) or (batch, len), with a last axis of components where num_axes > 1; or a
            range.
        state: the encoding's `state` of these tokens, (batch, heads, len, ...), or None.
        num_axes: number of components of a position.
        true_positions: original positions, if `positions` come from a position map; otherwise None.
        device: device of the positions, if neither x nor positions is a tensor.

    positions_or_range: the positions as a range if they are known, without waiting for the device,
    to be consecutive; otherwise the tensor.

    >>> import torch
    >>> keys = Tokens(torch.randn(1, 4, 10, 16), torch.arange(10))
    >>> keys[2:5].positions
    tensor([2, 3, 4])
    >>> keys[2:5].positions_or_range
    range(2, 5)
    """

    def __init__(
        self,
        x: Float[Tensor, "batch heads len width"] | None,
        positions: Positions,
        state: Shaped[Tensor, "batch state_heads len *state"] | None = None,
        num_axes: int = 1,
        true_positions: Positions | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.x = x
        self.state = state
        self.num_axes = num_axes
        self.true_positions = true_positions
        some_tensor = positions if isinstance(positions, Tensor) else x
        if device is None and some_tensor is not None:
            device = some_tensor.device
        self.device = device
        consecutive = as_range(positions) if num_axes == 1 else None
        if isinstance(positions, range) and consecutive is None:
            positions = as_tensor(positions, self.device)
        self._tensor = positions if isinstance(positions, Tensor) else None
        self.positions_or_range: Tensor | range = positions if consecutive is None else consecutive

    @property
    def positions(self) -> Shaped[Tensor, "..."]:
        """Return the positions as a tensor."""
        if self._tensor is None:
            self._tensor = as_tensor(self.positions_or_range, self.device)
        return self._tensor

    def __getitem__(self, span: slice) -> "Tokens":
        part = self._copy()
        if self.x is not None:
            part.x = self.x[:, :, span]
        part.positions_or_range = self._select_positions(self.positions_or_range, span)
        part._tensor = None
        if self._tensor is not None:
            part._tensor = self._select_positions(self._tensor, span)  # type: ignore[assignment]
        if self.state is not None:
            part.state = self.state[:, :, span]
        if self.true_positions is not None:
            part.true_positions = self._select_positions(self.true_positions, span)
        return part

    def __len__(self) -> int:
        if isinstance(
            self.positions_or_range, range
        ):  # torch.compile cannot trace len() of a range
            return self.positions_or_range.stop - self.positions_or_range.start
        return self.positions_or_range.shape[-1 if self.num_axes == 1 else -2]

    def _select_positions(self, positions: Tensor | range, span: slice) -> Tensor | range:
        """Return those of `positions` that belong to the tokens of a slice."""
        if isinstance(positions, range):
            return positions[span]
        return positions[..., span] if self.num_axes == 1 else positions[..., span, :]

    def with_vectors(self, x: Float[Tensor, "batch heads {len(self)} width"] | None) -> "Tokens":
        """Return the same tokens, at the same positions, with vectors x, or without any."""
        changed = self._copy()
        changed.x = x
        return changed

    def with_state(self, state: Shaped[Tensor, "batch state_heads len *state"] | None) -> "Tokens":
        """Return the same tokens with another state."""
        changed = self._copy()
        changed.state = state
        return changed

    def _copy(self) -> "Tokens":
        """Return a shallow copy."""
        # One by one: torch.compile traces neither copy.copy nor, up to torch 2.12, a __dict__.
        copied = object.__new__(Tokens)
        copied.x = self.x
        copied.state = self.state
        copied.num_axes = self.num_axes
        copied.true_positions = self.true_positions
        copied.device = self.device
        copied._tensor = self._tensor
        copied.positions_or_range = self.positions_or_range
        return copied

    def at(self, positions: Positions, *, mapped: bool = True) -> "Tokens":
        """Return the same tokens at other positions. If `mapped`, these come from a position map,
        and the original ones become true_positions."""
        if mapped and positions is self._tensor:
            return self
        original = None
        if mapped:
            original = (
                self.positions_or_range if self.true_positions is None else self.true_positions
            )
        return Tokens(self.x, positions, self.state, self.num_axes, original, self.device)

    def unmapped(self) -> "Tokens":
        """Return the same tokens at their original positions."""
        true = self.true_positions
        return self if true is None else self.at(true, mapped=False)
