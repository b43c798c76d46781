"""Check the tensors and encodings that users pass to attention and to layers.

In all functions `caller` is the name of the public function or class that checks, for messages.
"""

import sys
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from posenc.encodings.base.check_positions import validated_positions, validated_positions_of
from posenc.encodings.base.constructor_arguments import are_alike
from posenc.encodings.base.position_encoding import PositionEncoding, require_encoding
from posenc.encodings.numerics.torch_modes import autocast_enabled, extremes_if_readable
from posenc.encodings.terms.tokens import Tokens


def require_attention_encoding(caller: str, encoding: Any) -> PositionEncoding:
    """Return the encoding, or NoPE for None. Raise TypeError for anything but a PositionEncoding,
    and ValueError for one that attention cannot use: one that acts at the embeddings, or to which
    fully_shard was applied by itself."""
    encoding = require_encoding(caller, encoding)
    if 1 in encoding.claims.places:
        raise ValueError(
            f"{caller}: {type(encoding).__name__} acts at the embeddings, which attention does not "
            "see, so it would be ignored. Call x = encoding.embed(x, positions) before the first "
            "layer, and pass encoding.for_layer(i) to attention."
        )
    if hasattr(type(encoding), "unshard"):  # attention reads parameters without calling forward
        raise ValueError(
            f"{caller}: {type(encoding).__name__} is sharded on its own, and nothing gathers its "
            "parameters then. Shard the layer that contains it: fully_shard(layer)."
        )
    return encoding


def check_dtype(caller: str, x: Tensor, weight: Any) -> None:
    """Raise TypeError if x has another dtype than the layer's weights, unless autocast casts both
    or the weights are quantised."""
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return
    if autocast_enabled(x.device.type):
        return
    if x.dtype != weight.dtype:
        raise TypeError(
            f"{caller}: x is {x.dtype} and the layer's weights are {weight.dtype}. Convert one of "
            "them, as in layer.to(x.dtype), or call it under torch.autocast."
        )


def check_vectors(caller: str, **tensors: Any) -> None:
    """Raise TypeError or ValueError unless all are floating-point tensors (batch, heads, len,
    head_dim) of one dtype on one device. The arguments' names stand in the messages."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{caller}: {name} must be a tensor (batch, heads, len, head_dim), "
                f"got {type(t).__name__}."
            )
        if t.ndim != 4:
            raise ValueError(
                f"{caller}: {name} must have shape (batch, heads, len, head_dim), "
                f"got {tuple(t.shape)}."
            )
        if t is first or t.dtype != first.dtype:
            _check_floating(caller, name, t)
        if t.dtype != first.dtype or t.device != first.device:
            raise TypeError(
                f"{caller}: {first_name} and {name} must have one dtype and one device, got "
                f"{first.dtype} on {first.device} and {t.dtype} on {t.device}."
            )


def _check_floating(caller: str, name: str, t: Tensor) -> None:
    """Raise TypeError unless t is a tensor of real numbers in a dtype that attention takes."""
    if not t.is_floating_point() or t.dtype.itemsize < 2:
        raise TypeError(
            f"{caller}: {name} must be floating-point numbers of 16, 32 or 64 bits, got {t.dtype}. "
            f"Convert it, for example {name}.float()."
        )


def validated_embedding_positions(
    caller: str,
    x: Any,
    positions: Any,
    embed_dim: int | None = None,
    num_axes: int = 1,
    *,
    name: str = "x",
) -> Tensor | range:
    """Return the checked positions of the tokens of x (..., len, embed_dim), as a tensor of shape
    (len) or x.shape[:-1], where axes may be 1, or as a range.

    Raises: as validated_positions, and if x is no floating-point tensor of width embed_dim.
    """
    wanted = f"(batch, len, {embed_dim or 'embed_dim'})"
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: {name} must be a tensor {wanted}, got {type(x).__name__}.")
    if x.ndim < 2 or (embed_dim is not None and x.shape[-1] != embed_dim):
        raise ValueError(f"{caller}: {name} must be {wanted}, got {tuple(x.shape)}.")
    _check_floating(caller, name, x)
    argument = "positions" if name == "x" else f"{name}_positions"
    return validated_positions_of(x.shape[:-1], x, caller, argument, positions, num_axes)


def query_and_key_tokens(
    caller: str, q: Any, k: Any, positions: Any, num_axes: int = 1
) -> tuple[Tokens, Tokens]:
    """Return q and k at their common positions, as Tokens. Raise TypeError or ValueError unless
    they are vectors of the same tokens."""
    check_vectors(caller, q=q, k=k)
    checked = validated_positions(caller, "positions", positions, q, num_axes)
    if k.shape[2] != q.shape[2] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{caller}: q and k must have the same batch and length, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}. For a query against a longer past use posenc.attention, or rotate "
            "each with its own positions."
        )
    return Tokens(q, checked, num_axes=num_axes), Tokens(k, checked, num_axes=num_axes)


def check_tokens(caller: str, tokens: Any, vocab_size: int, name: str = "tokens") -> None:
    """Raise TypeError or ValueError unless tokens (batch, len) are integers in the vocabulary. Ids
    outside of the vocabulary are found on the CPU only."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"{caller}: {name} must be a tensor of int64 or int32, got {got}.")
    if tokens.ndim != 2:
        raise ValueError(f"{caller}: {name} must be (batch, len), got {tuple(tokens.shape)}.")
    low, high = extremes_if_readable(tokens) or (0, 0)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{caller}: {name} must be from 0 to {vocab_size - 1}, the vocabulary's last, "
            f"got {low if low < 0 else high}."
        )


def check_sizes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless batch, heads, lengths and head_dim of q, k and v fit together."""
    same_width = q.shape[-1] == k.shape[-1]
    same_batch = q.shape[0] == k.shape[0]
    if not same_width or not same_batch or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: "
            "k and v share heads and length, q and k share head_dim, all share the batch."
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"attention: {k.shape[1]} key/value heads do not divide {q.shape[1]} query heads."
        )


def check_state(name: str, state: Any, x: Tensor) -> None:
    """Raise ValueError unless the state is None or has the batch and length of x."""
    if state is None:
        return
    if not isinstance(state, Tensor) or state.ndim < 3:
        got = tuple(state.shape) if isinstance(state, Tensor) else type(state).__name__
        raise ValueError(
            f"attention: {name} must be what encoding.state(x, positions) gives, "
            f"(batch, heads, len, ...), got {got}."
        )
    if state.shape[0] != x.shape[0] or state.shape[2] != x.shape[2]:
        raise ValueError(
            f"attention: {name} must be of {x.shape[0]} rows and {x.shape[2]} tokens, "
            f"got {tuple(state.shape)}."
        )


def heads_first(caller: str, layout: str, *tensors: Any) -> tuple[Any, ...]:
    """Return tensors with heads before tokens, (batch, heads, len, ...): unchanged for the layout
    "bhtd", with axes 1 and 2 swapped for "bthd". Called twice it returns the first layout."""
    if layout not in ("bhtd", "bthd"):
        raise ValueError(f'{caller}: layout must be "bhtd" or "bthd", got {layout!r}.')
    if layout == "bhtd":
        return tensors
    return tuple(t.transpose(1, 2) if isinstance(t, Tensor) and t.ndim == 4 else t for t in tensors)


def check_sinks(sinks: Any, q: Tensor) -> None:
    """Raise TypeError or ValueError unless sinks are None or one real number for each head of q."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"attention: sinks must be a floating tensor (num_heads,), got {got}.")
    if tuple(sinks.shape) != (q.shape[1],) or sinks.device != q.device:
        raise ValueError(
            f"attention: sinks must be one logit for each of {q.shape[1]} query heads on "
            f"{q.device}, got shape {tuple(sinks.shape)} on {sinks.device}."
        )


def check_scale(caller: str, scale: Any) -> None:
    """Raise TypeError or ValueError unless `scale` is None or a finite number above 0."""
    if scale is None:
        return
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"{caller}: scale must be a number or None, got {scale!r}.")
    number: Any = scale  # compared, because float() of a large whole number overflows
    if not 0 < number <= sys.float_info.max:
        raise ValueError(
            f"{caller}: scale must be a finite number above 0, got {scale}. It multiplies q . k; "
            "None means 1/sqrt(head_dim), or the encoding's own."
        )


def prepared_or_encoding(encoding: Any, prepared: Any) -> Any:
    """Return the encoding to use in attention: `prepared` unless it is None, otherwise `encoding`.

    Raises: TypeError for anything but an encoding, ValueError if `prepared` was made from another.
    """
    if prepared is None:
        return encoding
    prepared = require_encoding("attention: prepared", prepared)
    if encoding is None:
        return prepared
    encoding = require_encoding("attention", encoding)
    pairs = zip(encoding.parameters(), prepared.parameters(), strict=False)
    if not are_alike(prepared, encoding) or any(a is not b for a, b in pairs):
        raise ValueError(
            f"attention: prepared is a {prepared}, and encoding is a {encoding}. "
            "Pass encoding.prepare(positions) of the same encoding, with the same parameters."
        )
    return prepared
