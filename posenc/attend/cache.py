"""The key/value cache of one attention layer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int, Real, Shaped
from torch import Tensor

from posenc.arguments import FARTHEST_POSITION, check_count, check_number, explain_misfits
from posenc.encodings.base.check_inputs import check_span_of_integers
from posenc.encodings.base.constructor_arguments import are_alike, repr_in_one_line
from posenc.encodings.base.position_encoding import PositionEncoding
from posenc.positions.tokens import as_tensor, concatenate_positions


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

    `crop`, `drop` and `shift` cut and move what is cached. A window that keeps the first token and
    slides on by one, its tokens numbered from 0:

    >>> cache.drop(1, 2)
    >>> cache.shift(-1, start=1)
    >>> cache.positions
    tensor([0, 1])
    """

    @explain_misfits
    def __init__(self) -> None:
        self.length = 0
        # Positions of the cached tokens, as a range where they came as ranges; None if there are
        # no tokens.
        self.positions_or_range: Tensor | range | None = None
        # Axis of the positions that counts tokens, from the end: -2 if the last one has components.
        self._token_axis = -1
        # "k", "v" and "state", each (batch, heads, capacity, ...), at the tokens' positions now.
        self._buffers: dict[str, Tensor] = {}
        # The "k" and "v" that shifts have changed, as the encoding made them, and the positions at
        # which it did. From these the next shift computes `_buffers` anew: rounding does not grow
        # with the number of shifts. Empty and None before the first shift.
        self._original_buffers: dict[str, Tensor] = {}
        self._original_positions: Tensor | range | None = None
        # The encoding that made the keys.
        self._key_encoding: PositionEncoding | None = None

    def record_encoding(self, encoding: PositionEncoding) -> None:
        """Record that `encoding` makes the keys of this cache. Raise ValueError if the cache has
        keys that an encoding of another class or with other arguments made."""
        recorded = self._key_encoding
        if self.length and recorded is not None and not are_alike(recorded, encoding):
            raise ValueError(
                f"KVCache: its keys were made for {repr_in_one_line(recorded)}, but attention has "
                f"{repr_in_one_line(encoding)}. Use a new cache."
            )
        self._key_encoding = encoding

    @contextmanager
    def unchanged_on_error(self) -> Iterator[None]:
        """Return a context manager that restores the cache if its block raises an exception."""
        attributes_before = {
            **vars(self),
            "_buffers": dict(self._buffers),
            "_original_buffers": dict(self._original_buffers),
        }
        try:
            yield
        except BaseException:
            vars(self).update(attributes_before)
            raise

    @property
    def positions(self) -> Shaped[Tensor, "..."] | None:
        """Return the positions of the cached tokens as a tensor, None if the cache is empty."""
        if self.positions_or_range is None:
            return None
        return as_tensor(self.positions_or_range, self._buffers["k"].device)

    def _check_fits(
        self, new_tensors: dict[str, Tensor], positions: Tensor | range, position_axis: int
    ) -> None:
        """Raise ValueError or TypeError if new tokens do not fit the cached ones.

        new_tensors: "k", "v" and perhaps "state" of the new tokens, by name. position_axis: the
        axis of `positions` that counts tokens.
        """
        num_keys = new_tensors["k"].shape[2]
        num_values = new_tensors["v"].shape[2]
        if num_keys != num_values:
            raise ValueError(f"KVCache: k has {num_keys} tokens and v has {num_values}.")
        for name, buffer in self._buffers.items():
            if name not in new_tensors:
                raise ValueError(f"KVCache: it has a {name} for every token, got none.")
            self._check_same_shape(name, new_tensors[name], buffer)
        if self.length and "state" in new_tensors and "state" not in self._buffers:
            raise ValueError("KVCache: the tokens in it have no state, but the new ones do.")
        if self.positions_or_range is None:
            return
        cached_dtype = _positions_dtype(self.positions_or_range)
        new_dtype = _positions_dtype(positions)
        if cached_dtype != new_dtype:
            raise TypeError(
                f"KVCache: it has positions in {cached_dtype}, got {new_dtype}; use one kind for "
                "all tokens."
            )
        if position_axis != self._token_axis:
            raise TypeError(
                f"KVCache: its positions count tokens along axis {self._token_axis}, got "
                f"position_axis={position_axis}; positions of several components have "
                "position_axis=-2."
            )

    def _check_same_shape(self, name: str, new_tensor: Tensor, buffer: Tensor) -> None:
        """Raise TypeError for another dtype or device than the cached ones, ValueError if batch,
        heads or width differ. name: "k", "v" or "state"; buffer: what is cached of it, (batch,
        heads, capacity, ...)."""
        if new_tensor.dtype != buffer.dtype or new_tensor.device != buffer.device:
            raise TypeError(
                f"KVCache: it has {name} in {buffer.dtype} on {buffer.device}, got "
                f"{new_tensor.dtype} on {new_tensor.device}."
            )
        batch_and_heads_fit = new_tensor.shape[:2] == buffer.shape[:2]
        if not batch_and_heads_fit or new_tensor.shape[3:] != buffer.shape[3:]:
            cached_shape = (*buffer.shape[:2], self.length, *buffer.shape[3:])
            raise ValueError(
                f"KVCache: it has {name} of shape {cached_shape}, got {tuple(new_tensor.shape)}: "
                "batch, heads and width must not change. Use a new cache for other sequences."
            )

    @explain_misfits
    def append(
        self,
        k: Float[Tensor, "batch num_kv_heads new width"],
        v: Float[Tensor, "batch num_kv_heads new v_width"],
        positions: Real[Tensor, "#batch new *axes"] | Real[Tensor, "new *axes"] | range,
        state: Shaped[Tensor, "batch state_heads new *state"] | None = None,
        *,
        position_axis: int = -1,
        keep_last_state: bool = False,
    ) -> tuple[
        Float[Tensor, "batch num_kv_heads {self.length} width"],
        Float[Tensor, "batch num_kv_heads {self.length} v_width"],
        Real[Tensor, "#batch {self.length} *axes"] | Real[Tensor, "{self.length} *axes"] | range,
        Shaped[Tensor, "batch state_heads stored *state"] | None,
    ]:
        """Store new keys and values (batch, num_kv_heads, new, width), their positions and state.
        Return keys, values, positions and states of all tokens, old and new.

        `position_axis` is the axis of tokens in `positions`: -2 if the last axis has components.
        With `keep_last_state` only the newest token's state is kept, for states that accumulate and
        that no score reads.

        Raises: ValueError or TypeError, before anything is stored, if the new tokens do not fit
        those in the cache.
        """
        tensors = {"k": k, "v": v}
        if state is not None:
            tensors["state"] = state
        self._check_fits(tensors, positions, position_axis)
        new_length = self.length + k.shape[2]
        for name, new in tensors.items():
            if name == "state" and keep_last_state:
                if new.shape[2]:  # a copy, because the caller may write to its state
                    self._buffers[name] = new[:, :, -1:].clone()
            else:
                self._store(self._buffers, name, new, new_length)
            if name in self._original_buffers:
                self._store(self._original_buffers, name, new, new_length)
        self._token_axis = position_axis
        if self._original_positions is not None:
            self._original_positions = concatenate_positions(
                self._original_positions, positions, position_axis, len(k), k.device
            )
        if self.positions_or_range is None:
            # A copy, because the caller may add to its positions in place.
            self.positions_or_range = (
                positions.clone() if isinstance(positions, Tensor) else positions
            )
        else:
            self.positions_or_range = concatenate_positions(
                self.positions_or_range, positions, position_axis, len(k), k.device
            )
        self.length = new_length
        return self.k, self.v, self.positions_or_range, self.state

    @property
    def k(self) -> Float[Tensor, "batch num_kv_heads {self.length} width"]:
        """Return the cached keys, a view of their buffer without its unused space."""
        return self._buffers["k"][:, :, : self.length]

    @property
    def v(self) -> Float[Tensor, "batch num_kv_heads {self.length} v_width"]:
        """Return the cached values, a view of their buffer without its unused space."""
        return self._buffers["v"][:, :, : self.length]

    @property
    def state(self) -> Shaped[Tensor, "batch state_heads stored *state"] | None:
        """Return the states of the cached tokens, of the newest token alone after
        `keep_last_state`; None if the encoding has no state."""
        buffer = self._buffers.get("state")
        return None if buffer is None else buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Return the bytes that all cached tokens take, without unused space in the buffers."""
        buffers = [*self._buffers.values(), *self._original_buffers.values()]
        return sum(buffer[:, :, : self.length].nbytes for buffer in buffers)

    @explain_misfits
    def reorder(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep the batch rows `rows` in that order, as beam search needs."""
        for buffers in (self._buffers, self._original_buffers):
            for name, buffer in buffers.items():
                buffers[name] = buffer.index_select(0, rows)
        self.positions_or_range = self._positions_of_rows(self.positions_or_range, rows)
        self._original_positions = self._positions_of_rows(self._original_positions, rows)

    def _positions_of_rows(
        self, positions: Tensor | range | None, rows: Tensor
    ) -> Tensor | range | None:
        """Return the positions of some rows of the batch; positions that all rows share are
        returned as they are."""
        if not isinstance(positions, Tensor):
            return positions
        axes_before_tokens = positions.ndim + self._token_axis  # the token axis counts from the end
        if axes_before_tokens == 0:  # no batch axis
            return positions
        return positions.index_select(0, rows) if positions.shape[0] > 1 else positions

    @explain_misfits
    def crop(self, length: int) -> None:
        """Keep the first `length` tokens, as after rejected tokens of a draft.

        Raises: ValueError if the cache has fewer tokens, or if it keeps only the state of its
        newest token and would lose that token.
        """
        check_count("KVCache.crop", "length", length, 0, self.length)
        self.drop(length, self.length)

    @explain_misfits
    def drop(self, start: int, stop: int) -> None:
        """Remove the tokens with indices start to stop - 1. The other tokens keep their positions:
        `shift` closes the gap. They keep their states, too: FoX's gates between a key and its query
        still include those of the removed tokens.

        Raises: ValueError as `crop`.
        """
        check_count("KVCache.drop", "start", start, 0, self.length)
        check_count("KVCache.drop", "stop", stop, start, self.length)
        if start == stop:
            return
        if stop - start == self.length:
            vars(self).update(vars(KVCache()))
            return
        state = self._buffers.get("state")
        has_only_last_state = state is not None and state.shape[2] < self.length
        if has_only_last_state and stop == self.length:
            raise ValueError(
                "KVCache: it keeps the state of its newest token only, so that token cannot be "
                "removed. Compute the tokens again with a new cache."
            )
        if stop < self.length:
            for buffers in (self._buffers, self._original_buffers):
                for name, buffer in buffers.items():
                    if name == "state" and has_only_last_state:
                        continue
                    kept_before = buffer[:, :, :start]
                    kept_after = buffer[:, :, stop : self.length]
                    buffers[name] = torch.cat([kept_before, kept_after], dim=2)
        self.positions_or_range = self._positions_without(self.positions_or_range, start, stop)
        self._original_positions = self._positions_without(self._original_positions, start, stop)
        self.length -= stop - start

    def _positions_without(
        self, positions: Tensor | range | None, start: int, stop: int
    ) -> Tensor | range | None:
        """Return positions without those of the tokens start to stop - 1; a range if the remaining
        ones are known to be consecutive."""
        if positions is None:
            return None
        if isinstance(positions, range) and stop == self.length:
            return positions[:start]
        if isinstance(positions, range) and start == 0:
            return positions[stop:]
        positions = as_tensor(positions, self._buffers["k"].device)
        axis = self._token_axis
        positions_before = positions.narrow(axis, 0, start)
        positions_after = positions.narrow(axis, stop, self.length - stop)
        return torch.cat([positions_before, positions_after], dim=axis)

    @explain_misfits
    def shift(self, delta: float, start: int = 0) -> None:
        """Add `delta` to the positions of the tokens from index `start` on.

        Cached keys become those that the encoding makes at the new positions, whatever scaling it
        has: R(after) R(before)^-1 k for a rotation R. Rounding does not grow with the number of
        shifts: from the first shift on, the cache also keeps the keys as the encoding made them,
        and later shifts are computed from these. Hidden states are not computed again, so what was
        computed from them stays as it was: values, and later layers.

        Args:
            delta: a whole number; for real positions also a real one. It is added to all components
                of a position.
            start: index of the first token that moves.

        Raises: ValueError if the cached keys do not determine the keys at other positions: with
        frequencies that depend on the length, positions that are part of hidden states, or an
        encoding that does not say how to move keys.
        """
        check_count("KVCache.shift", "start", start, 0, self.length)
        has_real_positions = (
            isinstance(self.positions_or_range, Tensor)
            and self.positions_or_range.is_floating_point()
        )
        check_number("KVCache.shift", "delta", delta, whole=not has_real_positions)
        if not abs(delta) < FARTHEST_POSITION:
            raise ValueError(f"KVCache.shift: delta must be below 2^62, got {delta}.")
        if start == self.length or not delta:
            return
        encoding = self._encoding_that_moves_keys()
        assert self.positions_or_range is not None  # only an empty cache has no positions
        new_positions = self._shifted_positions(start, delta)
        original_positions = self.positions_or_range
        if self._original_positions is not None:
            original_positions = self._original_positions
        original_positions = as_tensor(original_positions, self.k.device)
        moved_buffers, original_buffers = self._moved_buffers(
            encoding, start, original_positions, new_positions
        )
        # Only now, so that an error above leaves the cache as it was.
        self._buffers |= moved_buffers
        self._original_buffers |= original_buffers
        self.positions_or_range = new_positions
        self._original_positions = original_positions

    def _moved_buffers(
        self,
        encoding: PositionEncoding,
        start: int,
        original_positions: Tensor,
        new_positions: Tensor | range,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the buffers that a shift changes, and the original ones from which they were
        computed, both by name ("k", "v").

        Tokens from `start` on get the keys and values that the encoding makes at their new
        positions. Buffers that do not depend on the position are left out.
        """
        token_range = (self._token_axis, start, self.length - start)
        from_positions = original_positions.narrow(*token_range)
        to_positions = as_tensor(new_positions, self.k.device).narrow(*token_range)
        method_by_name: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
            "v": encoding.move_values
        }
        if not encoding.claims.needs_raw_k:
            method_by_name["k"] = encoding.move_keys

        moved_buffers = {}
        original_buffers = {}
        for name, move_vectors in method_by_name.items():
            buffer = self._buffers[name]
            original_buffer = self._original_buffers.get(name, buffer)
            unmoved_vectors = original_buffer[:, :, start : self.length]
            moved_vectors = move_vectors(unmoved_vectors, from_positions, to_positions)
            if moved_vectors is unmoved_vectors:  # they do not depend on the position
                continue
            moved_buffers[name] = torch.cat([buffer[:, :, :start], moved_vectors], dim=2)
            original_buffers[name] = original_buffer
        return moved_buffers, original_buffers

    def _encoding_that_moves_keys(self) -> PositionEncoding:
        """Return the encoding that made the keys. Raise ValueError if it cannot move them."""
        encoding = self._key_encoding
        if encoding is None:
            raise ValueError(
                "KVCache.shift: no encoding made these keys. Say which one does: "
                "cache.record_encoding(encoding)."
            )
        if encoding.embedding_encoding_name:
            raise ValueError(
                f"KVCache.shift: {encoding.embedding_encoding_name} added positions to the "
                "embeddings, so cached keys and values contain them. Compute the tokens again at "
                "their new positions."
            )
        if not encoding.claims.cache_safe:
            raise ValueError(
                f"KVCache.shift: the frequencies of {type(encoding).__name__} depend on the length "
                f"({encoding.extra_repr()}), so keys cached at one length cannot be moved exactly. "
                "Use a scaling with fixed frequencies."
            )
        return encoding

    def _shifted_positions(self, start: int, delta: float) -> Tensor | range:
        """Return the positions after a shift. Raise ValueError for numbers that are too large."""
        positions = self.positions_or_range
        assert positions is not None  # only an empty cache has no positions
        shifted_positions: Tensor | range
        if isinstance(positions, range) and start == 0:
            shifted_positions = range(
                positions.start + int(delta), positions.stop + int(delta), positions.step
            )
        else:
            shifted_positions = as_tensor(positions, self.k.device).clone()
            shifted_positions.narrow(self._token_axis, start, self.length - start).add_(delta)
        check_span_of_integers("KVCache.shift", "positions", shifted_positions)
        return shifted_positions

    def _store(
        self, buffers: dict[str, Tensor], name: str, new_tensor: Tensor, new_length: int
    ) -> None:
        """Store new tokens behind the cached ones, up to `new_length` tokens, in the buffer `name`
        of `buffers`, which doubles when it is full."""
        buffer = buffers.get(name)
        if buffer is None or buffer.shape[2] < new_length:
            capacity = new_length if buffer is None else max(new_length, 2 * buffer.shape[2])
            larger_buffer = new_tensor.new_zeros(
                *new_tensor.shape[:2], capacity, *new_tensor.shape[3:]
            )
            if buffer is not None:
                larger_buffer[:, :, : self.length] = buffer[:, :, : self.length]
            buffers[name] = buffer = larger_buffer
        buffer[:, :, self.length : new_length] = new_tensor


def _positions_dtype(positions: Tensor | range) -> torch.dtype:
    """Return the dtype of positions; int64 for a range."""
    return torch.int64 if isinstance(positions, range) else positions.dtype


def check_cache(caller: str, cache: object) -> None:
    """Raise TypeError for anything but a KVCache or None."""
    if cache is not None and not isinstance(cache, KVCache):
        raise TypeError(f"{caller}: cache must be a KVCache, got {type(cache).__name__}.")
