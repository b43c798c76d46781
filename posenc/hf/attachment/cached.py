"""Store positions and states of cached tokens as extra channels of their keys.

So transformers treats them like keys when it reorders beams, crops, applies windows or moves the
cache to the CPU. The channels store bits, so that bfloat16 keys keep exact positions.
"""

import math
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from posenc.hf.attachment.calls import ATTENDING, Attending
from posenc.positions import tensor


@dataclass(frozen=True)
class Columns:
    """Describe the channels appended to each key.

    key_dim: channels of what the cache stores as a key: those of a head, or of a latent from which
    keys and values are computed (DeepSeek's). axes, positions: components and dtype of a position.
    state: shape (heads, ...) and dtype of a token's state, or None.
    """

    key_dim: int
    axes: int
    positions: torch.dtype
    state: tuple[tuple[int, ...], torch.dtype] | None

    @classmethod
    def of(cls, now: Attending, key_dim: int) -> "Columns":
        axes = now.encoding.claims.num_axes
        state = now.state
        shape = None if state is None else (state.shape[1], *state.shape[3:])
        kept = None if state is None or shape is None else (shape, state.dtype)
        dtype = torch.int64 if isinstance(now.positions, range) else now.positions.dtype
        return cls(key_dim, axes, dtype, kept)

    @property
    def nbytes(self) -> int:
        """Return the bytes per token of positions and state."""
        shape, dtype = self.state or ((0,), self.positions)
        return self.axes * self.positions.itemsize + math.prod(shape) * dtype.itemsize

    def width(self, k: Tensor) -> int:
        """Return the number of channels to append to each head of k."""
        return -(-self.nbytes // (k.shape[1] * k.dtype.itemsize))

    def join(self, k: Tensor, positions: Tensor, state: Tensor | None) -> Tensor:
        """Append positions and states as channels to k (batch, num_kv_heads, len, head_dim)."""
        batch, heads, length, _ = k.shape
        if positions.ndim == 1 + (self.axes > 1):
            positions = positions.expand(batch, *positions.shape)
        parts = [_bytes(positions.reshape(batch, length, self.axes))]
        if state is not None:
            parts.append(_bytes(state.detach().movedim(2, 1).reshape(batch, length, -1)))
        width = self.width(k)
        room = heads * width * k.dtype.itemsize - self.nbytes
        parts.append(parts[0].new_zeros(batch, length, room))
        columns = torch.cat(parts, dim=-1).view(k.dtype).view(batch, length, heads, width)
        return torch.cat([k, columns.transpose(1, 2)], dim=-1)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Split joined keys into keys, positions (batch, len) or (batch, len, axes), and states."""
        batch, _, length, _ = joined.shape
        columns = joined[..., self.key_dim :].detach().transpose(1, 2).reshape(batch, length, -1)
        raw = columns.contiguous().view(torch.uint8)
        end = self.axes * self.positions.itemsize
        positions = raw[..., :end].contiguous().view(self.positions)
        state = None
        if self.state is not None:
            shape, dtype = self.state
            held = raw[..., end : self.nbytes].contiguous().view(dtype)
            state = held.view(batch, length, *shape).movedim(1, 2)
        if self.axes == 1:
            positions = positions[..., 0]
        return joined[..., : self.key_dim], positions, state


def self_attention(cache: Any) -> Any:
    """Return the cache of a stack's own tokens, also if the cache has another for a source."""
    return getattr(cache, "self_attention_cache", cache)


def past_state(cache: Any, now: Attending, device: torch.device) -> Tensor | None:
    """Return the cached states of earlier tokens on `device`; None if there are none."""
    layer = _layer(cache, now.layer.cache_index)
    columns = now.layer.columns
    if layer is None or columns is None or columns.state is None:
        return None
    seen = int(layer.get_seq_length())
    if seen == 0:
        return None
    keys = layer.keys if layer.keys.shape[2] <= seen else layer.keys[:, :, :seen]
    if keys.shape[-1] != columns.key_dim + columns.width(keys):
        raise ValueError(_STRANGE)
    return columns.split(keys.to(device))[2]


def watch(cache: Any) -> None:
    """Replace the cache's `update` by one that stores positions and states with the keys.

    Raises: ValueError for a quantised cache, which would round positions.
    """
    if "update" in vars(cache):
        return
    if any("Quantized" in type(layer).__name__ for layer in cache.layers):
        raise ValueError(
            "posenc: a quantised cache rounds what it stores, positions too. Take another "
            "cache_implementation."
        )
    cache.update = MethodType(_update, cache)


def _update(
    self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Update the cache with keys to which positions and states are appended."""
    update = type(self).update
    now = ATTENDING.get()
    if now is None:
        return update(self, key_states, value_states, layer_idx, *args, **options)
    columns = Columns.of(now, key_states.shape[-1])
    now.layer.columns = columns
    before = _layer(self, layer_idx)
    width = key_states.shape[-1] + columns.width(key_states)
    if before is not None and before.keys.shape[-1] != width:
        if int(before.get_seq_length()):
            raise ValueError(_STRANGE)
        # generate() has made room for keys alone, to read a prompt in chunks; the cache makes it
        # again when it is updated.
        before.is_initialized = False
    positions = tensor(now.positions, key_states.device)
    joined = columns.join(key_states, positions, now.state)
    joined, values = update(self, joined, value_states, layer_idx, *args, **options)
    length = key_states.shape[2]
    if joined.shape[2] == length:  # nothing came before
        return key_states, value_states
    keys, positions, state = columns.split(joined)
    now.kv_positions = positions
    if now.state is not None and state is not None and now.state.requires_grad:
        state = torch.cat([state[:, :, :-length], now.state], dim=2)
    now.kv_state = state
    return keys, values


def _layer(cache: Any, index: int) -> Any:
    layers = cache.layers
    return layers[index] if index < len(layers) and layers[index].is_initialized else None


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


_STRANGE = (
    "posenc: the cache holds keys that were stored without their positions, by another model or "
    "before the encoding was attached (or by prefix tuning). Start with an empty cache."
)
