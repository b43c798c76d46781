"""The key/value cache of one attention layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int, Real, Shaped
from torch import Tensor

from posenc.arguments import answered
from posenc.encodings.base.arguments import alike
from posenc.encodings.base.base import PositionEncoding
from posenc.positions import join, tensor


class KVCache:
    """Store keys, values, positions and states of earlier tokens in one layer, for inference.

    Keys are stored as `encoding.transform` returns them (RoPE: rotated), untransformed if the
    encoding claims `needs_raw_k`. Buffers double when full, so appending one token costs O(1)
    amortised.

    >>> layer = posenc.Attention(64, 4, encoding=posenc.RoPE(16, interleaved=False))
    >>> cache = posenc.KVCache()
    >>> for step in range(3):
    ...     out = layer(torch.randn(1, 1, 64), torch.tensor([step]), cache=cache)
    >>> cache.length
    3
    """

    @answered
    def __init__(self) -> None:
        self.length = 0
        self.where: Tensor | range | None = None
        self._token_axis = -1
        self._buffers: dict[str, Tensor] = {}
        self._made_by: PositionEncoding | None = None

    def belong_to(self, encoding: PositionEncoding) -> None:
        """Record that `encoding` made the cached keys. Raise ValueError if an encoding of another
        class or with other arguments made them."""
        before = self._made_by
        if self.length and before is not None and not alike(before, encoding):
            made_for, given = (" ".join(str(e).split()) for e in (before, encoding))
            raise ValueError(
                f"KVCache: its keys were made for {made_for}, but attention has {given}. Use a new "
                "cache."
            )
        self._made_by = encoding

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Restore the cache if the block raises an exception."""
        before = {**vars(self), "_buffers": dict(self._buffers)}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise

    @property
    def positions(self) -> Shaped[Tensor, "..."] | None:
        """Return the positions of the cached tokens as a tensor, None if the cache is empty."""
        if self.where is None:
            return None
        return tensor(self.where, self._buffers["k"].device)

    def _check(self, new: dict[str, Tensor], positions: Tensor | range, position_axis: int) -> None:
        k, v = new["k"], new["v"]
        if k.shape[2] != v.shape[2]:
            raise ValueError(f"KVCache: k has {k.shape[2]} tokens and v has {v.shape[2]}.")
        for name, buffer in self._buffers.items():
            if name not in new:
                raise ValueError(f"KVCache: it has a {name} for every token, got none.")
            t = new[name]
            if (t.dtype, t.device) != (buffer.dtype, buffer.device):
                raise TypeError(
                    f"KVCache: it has {name} in {buffer.dtype} on {buffer.device}, got {t.dtype} "
                    f"on {t.device}."
                )
            if (*t.shape[:2], *t.shape[3:]) != (*buffer.shape[:2], *buffer.shape[3:]):
                held = (*buffer.shape[:2], self.length, *buffer.shape[3:])
                raise ValueError(
                    f"KVCache: it has {name} of shape {held}, got {tuple(t.shape)}: batch, heads "
                    "and width must not change. Use a new cache for other sequences."
                )
        if self.length and "state" in new and "state" not in self._buffers:
            raise ValueError("KVCache: the tokens in it have no state, but the new ones do.")
        if self.where is not None:
            held, came = (
                torch.int64 if isinstance(t, range) else t.dtype for t in (self.where, positions)
            )
            if held != came or position_axis != self._token_axis:
                raise TypeError(
                    f"KVCache: it has positions in {held}, got {came}; use one kind for all tokens."
                )

    @answered
    def append(
        self, k: Float[Tensor, "batch num_kv_heads new width"],
        v: Float[Tensor, "batch num_kv_heads new v_width"],
        positions: Real[Tensor, "#batch new *axes"] | Real[Tensor, "new *axes"] | range,
        state: Shaped[Tensor, "batch state_heads new *state"] | None = None, *,
        position_axis: int = -1, keep_last_state: bool = False,
    ) -> tuple[
        Float[Tensor, "batch num_kv_heads {self.length} width"],
        Float[Tensor, "batch num_kv_heads {self.length} v_width"],
        Real[Tensor, "#batch {self.length} *axes"] | Real[Tensor, "{self.length} *axes"] | range,
        Shaped[Tensor, "batch state_heads stored *state"] | None,
    ]:  # fmt: skip
        """Store new keys, values (batch, num_kv_heads, new, width), their positions and state.

        Returns everything stored, old and new.

        `position_axis` is the axis of tokens in `positions`: -2 if the last axis has components.
        With `keep_last_state` only the newest token's state is kept, for states that accumulate and
        that no score reads.

        Raises: ValueError or TypeError, before anything is stored, if the new tokens do not fit
        those in the cache.
        """
        tensors = {"k": k, "v": v} if state is None else {"k": k, "v": v, "state": state}
        self._check(tensors, positions, position_axis)
        end = self.length + k.shape[2]
        for name, new in tensors.items():
            if name == "state" and keep_last_state:
                if new.shape[2]:  # a copy, because the caller may write to its state
                    self._buffers[name] = new[:, :, -1:].clone()
            else:
                self._write(name, new, end)
        self._token_axis = position_axis
        if self.where is None:  # a caller may count on in place
            self.where = positions.clone() if isinstance(positions, Tensor) else positions
        else:
            self.where = join(self.where, positions, position_axis, len(k), k.device)
        self.length = end
        return self.k, self.v, self.where, self.state

    @property
    def k(self) -> Float[Tensor, "batch num_kv_heads {self.length} width"]:
        return self._buffers["k"][:, :, : self.length]

    @property
    def v(self) -> Float[Tensor, "batch num_kv_heads {self.length} v_width"]:
        return self._buffers["v"][:, :, : self.length]

    @property
    def state(self) -> Shaped[Tensor, "batch state_heads stored *state"] | None:
        buffer = self._buffers.get("state")
        return None if buffer is None else buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the cached tokens, without unused space in the buffers."""
        return sum(b[:, :, : self.length].nbytes for b in self._buffers.values())

    @answered
    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the batch rows `rows` in that order, as beam search needs."""
        self._buffers = {name: b.index_select(0, rows) for name, b in self._buffers.items()}
        if isinstance(self.where, Tensor) and self.where.ndim + self._token_axis > 0:
            if self.where.shape[0] > 1:
                self.where = self.where.index_select(0, rows)

    def _write(self, name: str, new: Tensor, end: int) -> None:
        buffer = self._buffers.get(name, new[:, :, :0])
        if name not in self._buffers or buffer.shape[2] < end:
            capacity = max(end, 2 * buffer.shape[2])
            grown = new.new_zeros(*new.shape[:2], capacity, *new.shape[3:])
            grown[:, :, : self.length] = buffer[:, :, : self.length]
            self._buffers[name] = buffer = grown
        buffer[:, :, self.length : end] = new


def check_cache(owner: str, cache: object) -> None:
    """Raise TypeError for anything but a KVCache or None."""
    if cache is not None and not isinstance(cache, KVCache):
        raise TypeError(f"{owner}: cache must be a KVCache, got {type(cache).__name__}.")
