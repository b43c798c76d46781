"""One side of an attention: vectors, positions, and what the encoding keeps of each token."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Shaped
from torch import Tensor

from posenc.positions import Positions, part


@dataclass(frozen=True)
class Tokens:
    """The queries or the keys of one attention; sliceable along the tokens.

    Args:
        x: (batch, heads, len, width). At place 2 the vectors to transform; in a term those from
            before place 2. A term's keys have as many heads as its queries, and are None unless the
            encoding claims needs_raw_k.
        positions: (len) or (batch, len), with a last axis of components where num_axes > 1.
        state: what `state` gave for these tokens, (batch, heads, len, ...), or None.
        num_axes: number of components of a position.
        true_positions: the tokens' own positions, if `positions` are what a position map made of
            them; None: `positions` are their own.

    >>> import torch
    >>> keys = Tokens(torch.randn(1, 4, 10, 16), torch.arange(10))
    >>> keys[2:5].positions
    tensor([2, 3, 4])
    """

    x: Float[Tensor, "batch heads len width"] | None
    positions: Positions
    state: Shaped[Tensor, "batch state_heads len *state"] | None = None
    num_axes: int = 1
    true_positions: Positions | None = None

    def __getitem__(self, span: slice) -> Tokens:
        true = self.true_positions
        return Tokens(
            None if self.x is None else self.x[:, :, span],
            self._part(self.positions, span),
            None if self.state is None else self.state[:, :, span],
            self.num_axes,
            None if true is None else self._part(true, span),
        )

    def __len__(self) -> int:
        return self.positions.shape[-1 if self.num_axes == 1 else -2]

    def _part(self, positions: Tensor, span: slice) -> Tensor:
        if self.num_axes > 1:
            return positions[..., span, :]
        return part(positions, span.start or 0, len(self) if span.stop is None else span.stop)

    def given(self, x: Float[Tensor, "batch heads {len(self)} width"] | None) -> Tokens:
        """The same tokens with other vectors."""
        return Tokens(x, self.positions, self.state, self.num_axes, self.true_positions)
