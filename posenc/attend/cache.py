"""The key/value cache of one attention layer."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys, values, positions and per-token states seen so far; one object per layer, for
    inference.

    Keys are stored as the encoding's place 2 left them, or unrotated where the encoding claims
    `needs_raw_k`. Buffers double when full, so that appending one token costs O(1) amortised.
    """

    def __init__(self) -> None:
        self.length = 0
        self.positions: Tensor | None = None
        self._token_axis = -1
        self._buffers: dict[str, Tensor] = {}

    def append(
        self,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        state: Tensor | None = None,
        *,
        position_axis: int = -1,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Store new keys, values (batch, num_kv_heads, new, width), their positions and state.

        Returns everything stored, old and new.

        `position_axis` is the axis of `positions` that counts tokens: -2 where a last axis holds
        components.
        """
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"KVCache: k has {k.shape[2]} tokens and v has {v.shape[2]}.")
        end = self.length + k.shape[2]
        for name, new in (("k", k), ("v", v), ("state", state)):
            if new is not None:
                self._write(name, new, end)
        self._token_axis = position_axis
        if self.positions is None:
            self.positions = positions
        else:
            old, new = self.positions, positions
            if old.ndim != new.ndim:  # shared positions meet batched ones
                batch = k.shape[0]
                old, new = (
                    t if t.ndim == max(old.ndim, new.ndim) else t.expand(batch, *t.shape)
                    for t in (old, new)
                )
            self.positions = torch.cat([old, new], dim=position_axis)
        self.length = end
        return self.k, self.v, self.positions, self.state

    @property
    def k(self) -> Tensor:
        return self._buffers["k"][:, :, : self.length]

    @property
    def v(self) -> Tensor:
        return self._buffers["v"][:, :, : self.length]

    @property
    def state(self) -> Tensor | None:
        buffer = self._buffers.get("state")
        return None if buffer is None else buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes that the stored tokens take, without the room kept for later ones."""
        return sum(
            b[:, :, : self.length].numel() * b.element_size() for b in self._buffers.values()
        )

    def reorder(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` in that order, as beam search needs."""
        self._buffers = {name: b.index_select(0, rows) for name, b in self._buffers.items()}
        own = self.positions is not None and self.positions.ndim + self._token_axis > 0
        if own and self.positions.shape[0] > 1:  # type: ignore[union-attr]
            self.positions = self.positions.index_select(0, rows)  # type: ignore[union-attr]

    def _write(self, name: str, new: Tensor, end: int) -> None:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[2] < end:
            capacity = end if buffer is None else max(end, 2 * buffer.shape[2])
            grown = new.new_empty(*new.shape[:2], capacity, *new.shape[3:])
            if buffer is not None:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            self._buffers[name] = buffer = grown
        buffer[:, :, self.length : end] = new
