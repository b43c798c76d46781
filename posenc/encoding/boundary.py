"""What the user hands in, checked once: tensors, positions, encodings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc.encoding.base import PositionEncoding
from posenc.numbers.tracking import transformed
from posenc.positions import one_row
from posenc.terms.tokens import Tokens

_WHOLE_FLOATS = 2**24
"""From here on float32 cannot hold every whole number."""


def check_encoding(owner: str, encoding: Any) -> PositionEncoding:
    """The encoding that attention uses; None means none. Raises TypeError for anything but a
    PositionEncoding, and ValueError for one that acts at the embeddings, where attention cannot."""
    if encoding is None:
        return PositionEncoding()
    if not isinstance(encoding, PositionEncoding):
        what = f"the name {encoding!r}" if isinstance(encoding, str) else type(encoding).__name__
        raise TypeError(
            f"{owner}: encoding must be a PositionEncoding or None, got {what}. "
            "posenc.create(name, shape) builds one by name."
        )
    if 1 in encoding.claims.places:
        raise ValueError(
            f"{owner}: {type(encoding).__name__} acts at the embeddings, which attention does not "
            "see, so it would be ignored. Call x = encoding.embed(x, positions) before the first "
            "layer, and hand attention encoding.for_layer(i)."
        )
    return encoding


def check_vectors(owner: str, **tensors: Any) -> None:
    """Raise unless all are floating tensors (batch, heads, len, head_dim) of one dtype on one
    device."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(
                f"{owner}: {name} must be a tensor (batch, heads, len, head_dim), "
                f"got {type(t).__name__}."
            )
        if t.ndim != 4:
            raise ValueError(
                f"{owner}: {name} must have shape (batch, heads, len, head_dim), "
                f"got {tuple(t.shape)}."
            )
        if not t.is_floating_point():
            raise TypeError(
                f"{owner}: {name} must be floating-point numbers, got {t.dtype}. "
                f"Convert it, for example {name}.float()."
            )
        if t.dtype != first.dtype or t.device != first.device:
            raise TypeError(
                f"{owner}: {first_name} and {name} must have one dtype and one device, got "
                f"{first.dtype} on {first.device} and {t.dtype} on {t.device}."
            )


def check_positions(owner: str, name: str, positions: Any, x: Tensor, num_axes: int = 1) -> Tensor:
    """The positions of the tokens of x (batch, heads, len, width): int64, float32 or float64, (len)
    or (batch, len), plus a last axis of components where num_axes > 1.

    Raises: TypeError for what is no position, ValueError where the shape does not fit, and for
    numbers that are not finite or that float32 cannot tell from their neighbours (looked at on the
    CPU only).
    """
    _check_kind(owner, name, positions)
    batch, length = x.shape[0], x.shape[2]
    tokens = positions.shape[: positions.ndim - (num_axes > 1)]
    components = num_axes == 1 or (positions.ndim > 1 and positions.shape[-1] == num_axes)
    # Compared one by one: a set would hash the sizes, and torch.compile would start anew for each.
    batched = len(tokens) == 2 and (tokens[0] == 1 or tokens[0] == batch)
    if not (len(tokens) == 1 or batched) or tokens[-1] != length or not components:
        axis = f", {num_axes}" if num_axes > 1 else ""
        comma = "" if axis else ","
        raise ValueError(
            f"{owner}: {name} must have shape ({length}{axis or comma}) or "
            f"({batch}, {length}{axis}), one for each token of a tensor of shape "
            f"{tuple(x.shape)}; got {tuple(positions.shape)}."
        )
    if positions.is_floating_point():
        _check_floats(owner, name, positions)
    elif positions.dtype != torch.int64:
        positions = positions.long()
    return one_row(positions) if len(tokens) == 2 and tokens[0] == 1 else positions


def _check_kind(owner: str, name: str, positions: Any) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(
            f"{owner}: {name} must be a tensor of positions, got {type(positions).__name__}. "
            "posenc.positions.run(0, length) makes 0, 1, 2, ..."
        )
    if positions.dtype == torch.bool:
        raise TypeError(
            f"{owner}: {name} must be numbers, got booleans. For a mask of real tokens use "
            "posenc.positions.positions_from_mask(mask)."
        )
    if positions.dtype in (torch.float16, torch.bfloat16) or positions.is_complex():
        raise TypeError(
            f"{owner}: {name} must be integers, float32 or float64, got {positions.dtype}, which "
            "cannot tell neighbouring positions apart."
        )


def _check_floats(owner: str, name: str, positions: Tensor) -> None:
    if torch.compiler.is_compiling() or transformed() or positions.device.type != "cpu":
        return
    if not positions.numel():
        return
    largest = float(positions.detach().abs().amax())
    if not largest < float("inf"):
        raise ValueError(f"{owner}: {name} must be finite, got {largest}.")
    if positions.dtype == torch.float32 and largest >= _WHOLE_FLOATS:
        raise ValueError(
            f"{owner}: {name} reach {largest:.0f}, and float32 loses neighbours from "
            f"{_WHOLE_FLOATS} on. Use integers or float64."
        )


def check_pair(
    owner: str, q: Any, k: Any, positions: Any, num_axes: int = 1
) -> tuple[Tokens, Tokens]:
    """q and k of the same tokens, as a rotation called on its own takes them."""
    check_vectors(owner, q=q, k=k)
    checked = check_positions(owner, "positions", positions, q, num_axes)
    if k.shape[2] != q.shape[2] or k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{owner}: q and k must be of the same tokens, got {tuple(q.shape)} and "
            f"{tuple(k.shape)}. For a query against a longer past use posenc.attention, or rotate "
            "each with its own positions."
        )
    return Tokens(q, checked, num_axes=num_axes), Tokens(k, checked, num_axes=num_axes)
