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

from posenc.hf.attachment.forward_context import RUNNING_ATTENTION, RunningAttention
from posenc.positions.tokens import as_tensor


@dataclass(frozen=True)
class AppendedChannels:
    """Describe the channels appended to each key, which hold the token's position and state.

    key_dim: channels of what the cache stores as a key: those of a head, or of a latent from which
    keys and values are computed (DeepSeek's). num_axes: components of a position. positions_dtype:
    int64 if they are whole, else float64. state_layout: shape (heads, ...) and dtype of a token's
    state, or None. made_by: the encoding with which the tokens were read, in one line.
    """

    key_dim: int
    num_axes: int
    positions_dtype: torch.dtype
    state_layout: tuple[tuple[int, ...], torch.dtype] | None
    made_by: str

    @classmethod
    def for_attention(cls, running_attention: RunningAttention, key_dim: int) -> "AppendedChannels":
        """Return the channels for the tokens that the running attention reads. States are stored in
        float32 at least."""
        are_whole = (
            isinstance(running_attention.positions, range)
            or not running_attention.positions.is_floating_point()
        )
        state_layout = None
        if running_attention.state is not None:
            shape = (running_attention.state.shape[1], *running_attention.state.shape[3:])
            state_layout = shape, torch.promote_types(running_attention.state.dtype, torch.float32)
        num_axes = running_attention.encoding.claims.num_axes
        positions_dtype = torch.int64 if are_whole else torch.float64
        return cls(
            key_dim,
            num_axes,
            positions_dtype,
            state_layout,
            running_attention.layer.encoding_in_one_line,
        )

    @property
    def bytes_per_token(self) -> int:
        """Return the number of bytes that the position and the state of one token take."""
        shape, dtype = self.state_layout or ((0,), self.positions_dtype)
        return self.num_axes * self.positions_dtype.itemsize + math.prod(shape) * dtype.itemsize

    def channels_per_head(self, k: Tensor) -> int:
        """Return how many channels each head of k (batch, heads, len, head_dim) gets: the bytes of
        a token divided among its heads, rounded up."""
        return -(-self.bytes_per_token // k.shape[1])

    def require_same_layout(self, new_channels: "AppendedChannels") -> "AppendedChannels":
        """Return these channels of cached keys, in which new tokens can be stored too, after
        comparing them with `new_channels`, the channels of the new tokens. Only dtypes may differ.

        Raises: ValueError if more differs, or if fractions of new positions would be cut off.
        """
        # Keys are stored without the encoding, but all layers after the first have read what it
        # did to the tokens.
        if self.made_by != new_channels.made_by:
            raise ValueError(
                f"posenc: the cache was filled with {self.made_by} attached, and now it is "
                f"{new_channels.made_by}. Start with an empty cache."
            )
        new_shape = None if new_channels.state_layout is None else new_channels.state_layout[0]
        shape = None if self.state_layout is None else self.state_layout[0]
        if (new_channels.key_dim, new_channels.num_axes, new_shape) != (
            self.key_dim,
            self.num_axes,
            shape,
        ):
            raise ValueError(_FOREIGN_KEYS_MESSAGE)
        if self.positions_dtype == torch.int64 and new_channels.positions_dtype == torch.float64:
            raise ValueError(
                "posenc: the cache holds integer positions, and those of the new tokens are "
                "floating-point numbers, whose fractions it would cut off. Hand position_ids of "
                "one kind in all calls."
            )
        return self

    def append_to_keys(self, k: Tensor, positions: Tensor, state: Tensor | None) -> Tensor:
        """Append positions and states to k (batch, num_kv_heads, len, key_dim) as channels:
        (batch, num_kv_heads, len, key_dim + channels_per_head).

        positions: (len) or (batch, len), plus an axis of components if there are several. state:
        (#batch, heads, len, ...), or None.

        The bytes of a token are divided among its heads, and zeros fill up the last one. The 8
        bytes p of a position and no state, in 3 heads with keys k:

            head 0    k k k ... k p p p
            head 1    k k k ... k p p p
            head 2    k k k ... k p p 0
        """
        batch, num_heads, length, _ = k.shape
        if positions.ndim == 1 + (self.num_axes > 1):
            positions = positions.expand(batch, *positions.shape)
        positions_by_axis = positions.reshape(batch, length, self.num_axes).to(self.positions_dtype)
        channels = [_to_byte_channels(positions_by_axis, k.dtype)]
        if state is not None:
            assert self.state_layout is not None
            states_by_token = state.movedim(2, 1).reshape(batch, length, -1)
            channels.append(_to_byte_channels(states_by_token.to(self.state_layout[1]), k.dtype))
        num_channels = self.channels_per_head(k)
        num_unused = num_heads * num_channels - self.bytes_per_token
        channels.append(k.new_zeros(batch, length, num_unused))
        channels_by_head = torch.cat(channels, dim=-1).view(batch, length, num_heads, num_channels)
        return torch.cat([k, channels_by_head.transpose(1, 2)], dim=-1)

    def split_keys(self, joined_keys: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Split `joined_keys` into keys, positions (batch, len) or (batch, len, axes), and
        states."""
        keys = joined_keys[..., : self.key_dim]
        return keys, self.positions_in(joined_keys), self.states_in(joined_keys)

    def positions_in(self, joined_keys: Tensor) -> Tensor:
        """Return the positions in `joined_keys`: (batch, len) or (batch, len, axes)."""
        columns = self._channels_by_token(joined_keys)[
            ..., : self.num_axes * self.positions_dtype.itemsize
        ]
        positions = _from_byte_channels(columns, self.positions_dtype)
        return positions[..., 0] if self.num_axes == 1 else positions

    def states_in(self, joined_keys: Tensor) -> Tensor | None:
        """Return the states in `joined_keys`: (batch, heads, len, ...); None if there are none."""
        if self.state_layout is None:
            return None
        shape, dtype = self.state_layout
        positions_end = self.num_axes * self.positions_dtype.itemsize
        columns = self._channels_by_token(joined_keys)[..., positions_end : self.bytes_per_token]
        state = _from_byte_channels(columns, dtype)
        return state.view(*state.shape[:2], *shape).movedim(1, 2)

    def _channels_by_token(self, joined_keys: Tensor) -> Tensor:
        """Return the appended channels of all heads, (batch, len, channels)."""
        batch, _, length, _ = joined_keys.shape
        return joined_keys[..., self.key_dim :].transpose(1, 2).reshape(batch, length, -1)


def self_attention_cache(cache: Any) -> Any:
    """Return the cache of a stack's own tokens: the cache itself, or the part for self-attention of
    one that also holds an encoder's keys."""
    return getattr(cache, "self_attention_cache", cache)


def cached_states(
    cache: Any, running_attention: RunningAttention, device: torch.device
) -> Tensor | None:
    """Return the states of earlier tokens that the layer of a running attention has cached, on
    `device`; None if there are none.

    Raises: ValueError for a cache that a model without this encoding has filled.
    """
    layer_index = running_attention.layer.cache_index
    channels = cache.update.channels_by_layer.get(layer_index)
    if channels is None or channels.state_layout is None:
        return None
    joined_keys = _joined_keys(cache, layer_index)
    if joined_keys is None:
        return None
    if joined_keys.shape[-1] != channels.key_dim + channels.channels_per_head(joined_keys):
        raise ValueError(_FOREIGN_KEYS_MESSAGE)
    return channels.states_in(joined_keys.to(device))


def cached_positions(cache: Any) -> Tensor | None:
    """Return the positions of the tokens in a cache, (batch, len) or (batch, len, axes), of the
    layer that holds most of them: a window forgets. None if no layer has stored any."""
    update = vars(cache).get("update")
    if not isinstance(update, PositionedUpdate):
        return None
    longest_keys: Tensor | None = None
    channels_of_longest: AppendedChannels | None = None
    for layer_index, channels_of_layer in update.channels_by_layer.items():
        joined_keys = _joined_keys(cache, layer_index)
        if joined_keys is None or joined_keys.shape[
            -1
        ] != channels_of_layer.key_dim + channels_of_layer.channels_per_head(joined_keys):
            continue
        if longest_keys is None or joined_keys.shape[2] > longest_keys.shape[2]:
            longest_keys = joined_keys
            channels_of_longest = channels_of_layer
    if longest_keys is None or channels_of_longest is None:
        return None
    return channels_of_longest.positions_in(longest_keys.detach())


def _joined_keys(cache: Any, layer_index: int) -> Tensor | None:
    """Return the cached keys of a layer with their appended channels, without places that are still
    empty; None if it holds no token."""
    layer = _initialized_layer(cache, layer_index)
    if layer is None:
        return None
    num_stored = int(layer.get_seq_length())
    return layer.keys[:, :, :num_stored] if num_stored else None


def install_update(cache: Any) -> None:
    """Replace the cache's `update` by one that stores positions and states with the keys.

    Raises: ValueError for a quantised cache, which would round positions.
    """
    update_before = vars(cache).get("update")
    if isinstance(update_before, PositionedUpdate) and update_before.cache is cache:
        return
    if any("Quantized" in type(layer).__name__ for layer in cache.layers):
        raise ValueError(
            "posenc: a quantised cache rounds what it stores, positions too. Take another "
            "cache_implementation."
        )
    # A shallow copy of a cache has the `update` of the one that it was copied from.
    channels_by_layer = (
        dict(update_before.channels_by_layer) if isinstance(update_before, PositionedUpdate) else {}
    )
    cache.update = PositionedUpdate(cache, channels_by_layer)


@dataclass(eq=False)
class PositionedUpdate:
    """Callable that replaces a cache's `update`: it stores keys with positions and states appended.

    channels_by_layer: what is appended to the keys of each layer, by its index. It is a class, and
    not a function inside another, so that a cache with it can be pickled.
    """

    cache: Any
    channels_by_layer: dict[int, AppendedChannels] = field(default_factory=dict)

    def __call__(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return those of all tokens, as the cache's own `update`
        does, whose arguments these are. The running attention gets the positions and states of all
        keys."""
        update = type(self.cache).update
        running_attention = RUNNING_ATTENTION.get()
        if running_attention is None:
            self._refuse_after_detach(key_states, layer_idx)
            return update(self.cache, key_states, value_states, layer_idx, *args, **options)
        channels = self._channels_of_new_keys(running_attention, key_states, layer_idx)
        positions = as_tensor(running_attention.positions, key_states.device)
        joined_keys = channels.append_to_keys(key_states, positions, running_attention.state)
        joined_keys, values = update(
            self.cache, joined_keys, value_states, layer_idx, *args, **options
        )
        self.channels_by_layer[layer_idx] = channels
        if joined_keys.shape[2] == key_states.shape[2]:  # nothing came before
            return key_states, value_states
        keys, positions, state = channels.split_keys(joined_keys)
        running_attention.kv_positions = positions
        if state is not None:
            assert running_attention.state is not None
            running_attention.kv_state = state.to(running_attention.state.dtype)
        return keys, values

    def _refuse_after_detach(self, keys: Tensor, layer_index: int) -> None:
        """Raise ValueError if the cache holds positions, and the model no longer has an encoding to
        read them."""
        channels = self.channels_by_layer.get(layer_index)
        layer = _initialized_layer(self.cache, layer_index)
        if channels is None or layer is None or not int(layer.get_seq_length()):
            return
        if keys.shape[-1] == channels.key_dim and layer.keys.shape[-1] != channels.key_dim:
            raise ValueError(
                "posenc: the cache was filled while an encoding was attached to the model, which "
                "is gone. Start with an empty cache."
            )

    def _channels_of_new_keys(
        self, running_attention: RunningAttention, keys: Tensor, layer_index: int
    ) -> AppendedChannels:
        """Return the channels to append to new keys: those of the layer's earlier keys, if it holds
        any.

        Raises: ValueError if the earlier keys have others, or none.
        """
        new_channels = AppendedChannels.for_attention(running_attention, keys.shape[-1])
        layer = _initialized_layer(self.cache, layer_index)
        if layer is None:
            return new_channels
        if int(layer.get_seq_length()):
            cached_channels = self.channels_by_layer.get(layer_index)
            if cached_channels is None or layer.keys.shape[
                -1
            ] != cached_channels.key_dim + cached_channels.channels_per_head(keys):
                raise ValueError(_FOREIGN_KEYS_MESSAGE)
            return cached_channels.require_same_layout(new_channels)
        if layer.keys.shape[-1] != keys.shape[-1] + new_channels.channels_per_head(keys):
            # generate() has made room for keys alone, to read a prompt in chunks; the cache makes
            # it again when it is updated.
            layer.is_initialized = False
        return new_channels


def _initialized_layer(cache: Any, layer_index: int) -> Any:
    """Return the cache's layer of this index; None if it is missing or has no room for keys yet."""
    layers = cache.layers
    return (
        layers[layer_index]
        if layer_index < len(layers) and layers[layer_index].is_initialized
        else None
    )


def _to_byte_channels(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of values (..., n) as numbers from 0 to 255, (..., n * bytes), of a dtype.

    Bytes have no gradient. So a term that is 0 is added to the first byte of each value, and the
    gradient flows through it: value - value.detach().
    """
    byte_values = values.detach().contiguous().unsqueeze(-1).view(torch.uint8).to(dtype)
    if values.requires_grad:
        zero_with_gradient = (values - values.detach()).nan_to_num()  # infinity - infinity is NaN
        first_byte = byte_values[..., :1] + zero_with_gradient.to(dtype).unsqueeze(-1)
        byte_values = torch.cat([first_byte, byte_values[..., 1:]], dim=-1)
    return byte_values.flatten(-2)


def _from_byte_channels(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (..., n) of a dtype from the numbers that `_to_byte_channels` made."""
    numbers = numbers.unflatten(-1, (-1, dtype.itemsize))
    values = numbers.detach().to(torch.uint8).contiguous().view(dtype).squeeze(-1)
    if numbers.requires_grad and dtype.is_floating_point:
        first_byte = numbers[..., 0]
        values = values + (first_byte - first_byte.detach()).to(dtype)
    return values


_FOREIGN_KEYS_MESSAGE = (
    "posenc: the cache holds keys that were stored without their positions, by another model or "
    "before the encoding was attached (or by prefix tuning). Start with an empty cache."
)
