"""Store positions and states of cached tokens as extra channels of their keys.

So transformers treats them like keys when it reorders beams, crops, applies windows or moves the
cache to the CPU. Each channel holds one byte as a number from 0 to 255. bfloat16, float16 and
float32 have all of them, so positions and states stay exact, whatever the keys are cast to.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from posenc.hf.attachment.calls import ATTENDING, Attending
from posenc.positions import tensor


@dataclass(frozen=True)
class Columns:
    """Describe the channels appended to each key.

    key_dim: channels of what the cache stores as a key: those of a head, or of a latent from which
    keys and values are computed (DeepSeek's). axes: components of a position. positions: int64 if
    they are whole, else float64. state: shape (heads, ...) and dtype of a token's state, or None.
    made_by: the encoding with which the tokens were read, in one line.
    """

    key_dim: int
    axes: int
    positions: torch.dtype
    state: tuple[tuple[int, ...], torch.dtype] | None
    made_by: str

    @classmethod
    def of(cls, now: Attending, key_dim: int) -> "Columns":
        """Return the columns for the tokens that an attention reads now."""
        whole = isinstance(now.positions, range) or not now.positions.is_floating_point()
        state = None
        if now.state is not None:
            shape = (now.state.shape[1], *now.state.shape[3:])
            state = shape, torch.promote_types(now.state.dtype, torch.float32)
        axes = now.encoding.claims.num_axes
        dtype = torch.int64 if whole else torch.float64
        return cls(key_dim, axes, dtype, state, now.layer.described)

    @property
    def bytes_per_token(self) -> int:
        """Return the number of bytes that the position and the state of one token take."""
        shape, dtype = self.state or ((0,), self.positions)
        return self.axes * self.positions.itemsize + math.prod(shape) * dtype.itemsize

    def width(self, k: Tensor) -> int:
        """Return the number of channels to append to each head of k."""
        return -(-self.bytes_per_token // k.shape[1])

    def held_with(self, new: "Columns") -> "Columns":
        """Return how a cache that holds these columns stores new tokens, which have `new`.

        Raises: ValueError if they differ in more than the dtypes of numbers.
        """
        # Keys are stored without the encoding, but all layers after the first have read what it
        # did to the tokens.
        if self.made_by != new.made_by:
            raise ValueError(
                f"posenc: the cache was filled with {self.made_by} attached, and now it is "
                f"{new.made_by}. Start with an empty cache."
            )
        new_shape = None if new.state is None else new.state[0]
        shape = None if self.state is None else self.state[0]
        if (new.key_dim, new.axes, new_shape) != (self.key_dim, self.axes, shape):
            raise ValueError(_STRANGE)
        if self.positions == torch.int64 and new.positions == torch.float64:
            raise ValueError(
                "posenc: the cache holds integer positions, and those of the new tokens are "
                "floating-point numbers, whose fractions it would cut off. Hand position_ids of "
                "one kind in all calls."
            )
        return self

    def join(self, k: Tensor, positions: Tensor, state: Tensor | None) -> Tensor:
        """Append positions and states as channels to k (batch, num_kv_heads, len, head_dim)."""
        batch, heads, length, _ = k.shape
        if positions.ndim == 1 + (self.axes > 1):
            positions = positions.expand(batch, *positions.shape)
        places = positions.reshape(batch, length, self.axes).to(self.positions)
        parts = [_as_bytes(places, k.dtype)]
        if state is not None:
            assert self.state is not None
            by_token = state.movedim(2, 1).reshape(batch, length, -1)
            parts.append(_as_bytes(by_token.to(self.state[1]), k.dtype))
        width = self.width(k)
        parts.append(k.new_zeros(batch, length, heads * width - self.bytes_per_token))
        columns = torch.cat(parts, dim=-1).view(batch, length, heads, width)
        return torch.cat([k, columns.transpose(1, 2)], dim=-1)

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Split joined keys into keys, positions (batch, len) or (batch, len, axes), and states."""
        keys = joined[..., : self.key_dim]
        return keys, self.positions_of(joined), self.state_of(joined)

    def positions_of(self, joined: Tensor) -> Tensor:
        """Return the positions in joined keys: (batch, len) or (batch, len, axes)."""
        columns = self._by_token(joined)[..., : self.axes * self.positions.itemsize]
        positions = _from_bytes(columns, self.positions)
        return positions[..., 0] if self.axes == 1 else positions

    def state_of(self, joined: Tensor) -> Tensor | None:
        """Return the states in joined keys: (batch, heads, len, ...); None if there are none."""
        if self.state is None:
            return None
        shape, dtype = self.state
        after_positions = self.axes * self.positions.itemsize
        columns = self._by_token(joined)[..., after_positions : self.bytes_per_token]
        state = _from_bytes(columns, dtype)
        return state.view(*state.shape[:2], *shape).movedim(1, 2)

    def _by_token(self, joined: Tensor) -> Tensor:
        """Return the appended channels of all heads, (batch, len, channels)."""
        batch, _, length, _ = joined.shape
        return joined[..., self.key_dim :].transpose(1, 2).reshape(batch, length, -1)


def self_attention(cache: Any) -> Any:
    """Return the cache of a stack's own tokens, also if the cache has another for a source."""
    return getattr(cache, "self_attention_cache", cache)


def past_state(cache: Any, now: Attending, device: torch.device) -> Tensor | None:
    """Return the cached states of earlier tokens on `device`; None if there are none."""
    index = now.layer.cache_index
    columns = cache.update.columns.get(index)
    if columns is None or columns.state is None:
        return None
    keys = _joined_keys(cache, index)
    if keys is None:
        return None
    if keys.shape[-1] != columns.key_dim + columns.width(keys):
        raise ValueError(_STRANGE)
    return columns.state_of(keys.to(device))


def past_positions(cache: Any) -> Tensor | None:
    """Return the positions of the tokens in a cache, (batch, len) or (batch, len, axes), of the
    layer that holds most of them: a window forgets. None if no layer has stored any."""
    update = vars(cache).get("update")
    if not isinstance(update, Update):
        return None
    longest: Tensor | None = None
    found: Columns | None = None
    for index, columns in update.columns.items():
        keys = _joined_keys(cache, index)
        if keys is None or keys.shape[-1] != columns.key_dim + columns.width(keys):
            continue
        if longest is None or keys.shape[2] > longest.shape[2]:
            longest, found = keys, columns
    if longest is None or found is None:
        return None
    return found.positions_of(longest.detach())


def _joined_keys(cache: Any, index: int) -> Tensor | None:
    """Return the keys of a layer's tokens, without places that are still empty; None for none."""
    layer = _layer(cache, index)
    if layer is None:
        return None
    seen = int(layer.get_seq_length())
    return layer.keys[:, :, :seen] if seen else None


def watch(cache: Any) -> None:
    """Replace the cache's `update` by one that stores positions and states with the keys.

    Raises: ValueError for a quantised cache, which would round positions.
    """
    before = vars(cache).get("update")
    if isinstance(before, Update) and before.cache is cache:
        return
    if any("Quantized" in type(layer).__name__ for layer in cache.layers):
        raise ValueError(
            "posenc: a quantised cache rounds what it stores, positions too. Take another "
            "cache_implementation."
        )
    # A shallow copy of a cache has the `update` of the one that it was copied from.
    columns = dict(before.columns) if isinstance(before, Update) else {}
    cache.update = Update(cache, columns)


@dataclass(eq=False)
class Update:
    """Update a cache with keys to which positions and states are appended.

    columns: what is appended in each layer, by its index. A class, so that a cache with it can be
    pickled.
    """

    cache: Any
    columns: dict[int, Columns] = field(default_factory=dict)

    def __call__(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Update the cache as its own `update` does, whose arguments these are."""
        update = type(self.cache).update
        now = ATTENDING.get()
        if now is None:
            self._refuse_detached(key_states, layer_idx)
            return update(self.cache, key_states, value_states, layer_idx, *args, **options)
        columns = self._columns(now, key_states, layer_idx)
        positions = tensor(now.positions, key_states.device)
        joined = columns.join(key_states, positions, now.state)
        joined, values = update(self.cache, joined, value_states, layer_idx, *args, **options)
        self.columns[layer_idx] = columns
        if joined.shape[2] == key_states.shape[2]:  # nothing came before
            return key_states, value_states
        keys, positions, state = columns.split(joined)
        now.kv_positions = positions
        if state is not None:
            assert now.state is not None
            now.kv_state = state.to(now.state.dtype)
        return keys, values

    def _refuse_detached(self, keys: Tensor, index: int) -> None:
        """Raise ValueError if the cache holds positions, and the model no longer has an encoding to
        read them."""
        held = self.columns.get(index)
        before = _layer(self.cache, index)
        if held is None or before is None or not int(before.get_seq_length()):
            return
        if keys.shape[-1] == held.key_dim and before.keys.shape[-1] != held.key_dim:
            raise ValueError(
                "posenc: the cache was filled while an encoding was attached to the model, which "
                "is gone. Start with an empty cache."
            )

    def _columns(self, now: Attending, keys: Tensor, index: int) -> Columns:
        """Return the columns of the new keys, like those that the cache holds already.

        Raises: ValueError if it holds others, or none.
        """
        columns = Columns.of(now, keys.shape[-1])
        before = _layer(self.cache, index)
        if before is None:
            return columns
        if int(before.get_seq_length()):
            held = self.columns.get(index)
            if held is None or before.keys.shape[-1] != held.key_dim + held.width(keys):
                raise ValueError(_STRANGE)
            return held.held_with(columns)
        if before.keys.shape[-1] != keys.shape[-1] + columns.width(keys):
            # generate() has made room for keys alone, to read a prompt in chunks; the cache makes
            # it again when it is updated.
            before.is_initialized = False
        return columns


def _layer(cache: Any, index: int) -> Any:
    """Return the cache's layer of this index; None if it is missing or holds nothing yet."""
    layers = cache.layers
    return layers[index] if index < len(layers) and layers[index].is_initialized else None


def _as_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of the values of x (..., n) as numbers (..., n * bytes) of a dtype.

    Bytes have no derivative. So the first of each value carries that of the value, in a term that
    is 0: x - (x without derivative).
    """
    numbers = x.detach().contiguous().unsqueeze(-1).view(torch.uint8).to(dtype)
    if x.requires_grad:
        nothing = (x - x.detach()).nan_to_num()  # infinity - infinity is NaN
        first = numbers[..., :1] + nothing.to(dtype).unsqueeze(-1)
        numbers = torch.cat([first, numbers[..., 1:]], dim=-1)
    return numbers.flatten(-2)


def _from_bytes(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (..., n) of a dtype whose bytes `_as_bytes` made numbers."""
    numbers = numbers.unflatten(-1, (-1, dtype.itemsize))
    x = numbers.detach().to(torch.uint8).contiguous().view(dtype).squeeze(-1)
    if numbers.requires_grad and dtype.is_floating_point:
        first = numbers[..., 0]
        x = x + (first - first.detach()).to(dtype)
    return x


_STRANGE = (
    "posenc: the cache holds keys that were stored without their positions, by another model or "
    "before the encoding was attached (or by prefix tuning). Start with an empty cache."
)
