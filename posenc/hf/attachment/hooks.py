"""Hooks around each forward of an attached model. They find positions, prepare the encoding for
them, and tell every attention whose tokens it sees."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from posenc.encodings import Compose, PositionEncoding
from posenc.hf.attachment.attention import LazyMask
from posenc.hf.attachment.cached import Columns, past_state, self_attention, watch
from posenc.hf.attachment.calls import ATTENDING, ENCODING, FORWARD, LAYER, Attending, Forward
from posenc.positions import counted, documents_from_positions, positions_from_mask, tensor


@dataclass(eq=False)
class Layer:
    """Data that an attention module keeps while an encoding is attached.

    index: layer index for the encoding. cache_index: that for the cache. own: the model's own bias
    if it is kept.
    told: True if forwards receive positions (a Vision Transformer's do not).
    """

    stack: nn.Module
    index: int
    cache_index: int
    head_dim: int
    own: PositionEncoding | None = None
    told: bool = True
    columns: Columns | None = None


def begin(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Find positions and prepare the encoding before a stack's forward."""
    given = _bound(stack, args, kwargs)
    if given.get("output_attentions"):
        raise ValueError("posenc attention keeps no weights to show: output_attentions is off.")
    encoding: Any = getattr(stack, ENCODING)
    positions, documents = _positions(given, encoding.claims.num_axes)
    if positions is None:
        prepared = encoding
    else:
        changing = not encoding.claims.cache_safe
        last = tensor(positions)
        length = int(last.max()) + 1 if changing and last.numel() else None
        prepared = encoding.prepare(positions, length)
    forward = Forward(stack, prepared, positions, documents)
    forward.token = FORWARD.set(forward)
    embeds = kwargs.get("inputs_embeds")
    if 1 in encoding.claims.places and embeds is not None:
        assert positions is not None
        embeds = prepared.embed(embeds, tensor(positions, embeds.device))
        kwargs = {**kwargs, "inputs_embeds": embeds}
    return args, kwargs


def end(stack: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Forget the forward after a stack has run, even after an exception."""
    forward = FORWARD.get()
    if forward is not None and forward.stack is stack:
        FORWARD.reset(forward.token)


def embedded(table: nn.Module, args: tuple, out: Tensor) -> Tensor:
    """Add the encoding to the token embeddings."""
    forward = FORWARD.get()
    if forward is None:
        raise ValueError(
            "posenc: the token embeddings were called outside of the model's forward, where "
            "positions are unknown."
        )
    assert forward.positions is not None
    return forward.encoding.embed(out, tensor(forward.positions, out.device))


def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    """Find encoding, positions and states before an attention module runs."""
    layer: Layer = vars(module)[LAYER]
    everything = (*args, *kwargs.values())
    masks = [v for v in everything if isinstance(v, LazyMask) and v.forward is not None]
    forward = masks[0].forward if masks else FORWARD.get()
    x = kwargs.get("hidden_states", args[0] if args else None)
    assert isinstance(x, Tensor)
    if forward is None:
        if layer.told:
            raise ValueError(
                f"posenc: {type(module).__name__} was called outside of "
                f"{type(layer.stack).__name__}, which knows the positions. Call the model, not its "
                "layers or its forward method (peft calls the method of the model that it wraps: "
                "wrap the model with its head)."
            )
        forward = Forward(layer.stack, getattr(layer.stack, ENCODING), None)
    positions = forward.positions
    if positions is None:
        positions = counted(0, x.shape[1], x.device)
    encoding = forward.encoding.for_layer(layer.index)
    if layer.own is not None:
        encoding = layer.own if type(encoding) is PositionEncoding else Compose(layer.own, encoding)
    now = Attending(module, forward, encoding, positions, None, positions, None, layer)
    cache = next((v for v in everything if hasattr(v, "get_seq_length")), None)
    past = None
    if cache is not None:
        cache = self_attention(cache)
        watch(cache)
        past = past_state(cache, now, x.device)
    now.state = now.kv_state = encoding.state(x, tensor(positions, x.device), past)
    now.token = ATTENDING.set(now)


def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
    """Clear the record of which attention module is running, after it returns or raises."""
    now = ATTENDING.get()
    if now is not None and now.module is module:
        ATTENDING.reset(now.token)


def _bound(stack: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward by name."""
    if not args:
        return kwargs
    return dict(inspect.signature(stack.forward).bind_partial(*args, **kwargs).arguments) | kwargs


def _positions(given: dict[str, Any], axes: int) -> tuple[Tensor | range | None, Tensor | None]:
    """Return the positions of the new tokens, and the documents of a packed row.

    Positions are position_ids if given; otherwise tokens are counted in the attention mask, without
    padding, or after those in the cache.
    """
    tokens = given.get("input_ids")
    tokens = given.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        return None, None
    length, device = tokens.shape[1], tokens.device
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    past = 0 if cache is None else int(self_attention(cache).get_seq_length())
    told = given.get("position_ids")
    if told is not None:
        return _told(told, axes, packed=mask is None and past == 0)
    if axes > 1:
        raise ValueError(
            f"posenc: the encoding takes positions of {axes} components: hand the model "
            f"position_ids of shape ({axes}, batch, len)."
        )
    if given.get("cu_seq_lens_q") is not None:
        raise ValueError("posenc: packed rows need position_ids, which begin anew in each text.")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or bool((mask != 0).all()):
        return counted(past, length, device), None
    real = positions_from_mask(mask)[:, past : past + length]
    return real.to(device), None


def _told(told: Tensor, axes: int, packed: bool) -> tuple[Tensor, Tensor | None]:
    """Return position_ids in posenc's shape, and the documents, which begin where positions
    restart."""
    if told.ndim == 3 and axes > 1 and told.shape[0] == axes + 1:
        told = told[1:]  # generate() puts the token's number before its components
    if told.ndim == 3 or axes > 1:
        if told.ndim != 3 or told.shape[0] != axes:
            raise ValueError(
                f"posenc: the encoding takes positions of {axes} components, and position_ids have "
                f"shape {tuple(told.shape)}."
            )
        return told.movedim(0, -1).contiguous(), None
    on_cpu = told.device.type == "cpu"
    if told.ndim == 2 and (told.shape[0] == 1 or (on_cpu and bool((told == told[:1]).all()))):
        told = told[0].contiguous()
    if not packed or told.is_floating_point():
        return told, None
    documents = documents_from_positions(told)
    return told, documents if bool((documents > 0).any()) else None
