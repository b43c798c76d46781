"""Short rows by one pass of C over each head, whose scores never leave the cache, on processors
that multiply bfloat16 in vectors."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.numbers import native

SOURCE = Path(__file__).with_suffix(".c")
BLOCK = 32
"""As in short_heads.c: rows and keys of the weights are filled up to a multiple of it."""


def library() -> Any:
    """short_heads.c, or None where there is no compiler, or the processor is not one for it."""
    loaded = native.load(SOURCE, ("suits",))
    return loaded if loaded is not None and loaded.suits() else None


class _Shape(ctypes.Structure):
    """`Shape` of short_heads.c."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "heads", "rows", "keys", "width", "v_width", "shift")
        ),
        *((name, ctypes.c_int64 * 3) for name in ("q", "k", "v", "grad", "bias", "visible")),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def _shape(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor | None, bias: Tensor | None,
    visible: Tensor | None, scale: float, shift: int,
) -> _Shape:  # fmt: skip
    strides = [
        (ctypes.c_int64 * 3)(*((0, 0, 0) if t is None else t.stride()[:3]))
        for t in (q, k, v, grad, bias, visible)
    ]
    sizes = (*q.shape[:3], k.shape[2], q.shape[3], v.shape[3], shift)
    return _Shape(*sizes, *strides, scale)


def _run(function: Any, tensors: tuple[Tensor | None, ...], shape: _Shape) -> None:
    places = [native.pointer(t) for t in tensors]

    def part(first: int, last: int) -> None:
        ends = ctypes.c_int64(first), ctypes.c_int64(last)
        if function(*places, ctypes.byref(shape), *ends):
            raise MemoryError("attention of short rows: no memory for one head's scores.")

    native.in_parts(shape.heads, part)


def _new(like: Tensor, width: int) -> Tensor:
    """(batch, heads, len, width), laid out as (batch, len, heads, width): so the projections beside
    it need no copy."""
    batch, heads, length = like.shape[:3]
    return like.new_empty(batch, length, heads, width).transpose(1, 2)


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, visible: Tensor | None, scale: float,
    shift: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """softmax(scale * q k^T + bias) v, and the weights for the backward pass."""
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    q, k, v = map(_side_by_side, (q, k, v))
    bias, visible = (native.in_rows(t, (batch, heads, rows, keys)) for t in (bias, visible))
    weights = q.new_empty(batch, heads, _filled(rows), _filled(keys))
    out = _new(q, v.shape[3])
    shape = _shape(q, k, v, None, bias, visible, scale, shift)
    _run(library().attend, (q, k, v, bias, visible, weights, out), shape)
    return out, weights


def gradients(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, grad: Tensor, grad_bias: Tensor | None,
    scale: float, shift: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Those of q, k and v; that of the bias, (1 or batch, heads, rows, keys) in float32, is added
    to `grad_bias`."""
    q, k, v, grad = map(_side_by_side, (q, k, v, grad))
    rows = None if grad_bias is None else grad_bias.expand(*q.shape[:3], k.shape[2])
    found = _new(q, q.shape[3]), _new(k, k.shape[3]), _new(v, v.shape[3])
    shape = _shape(q, k, v, grad, rows, None, scale, shift)
    _run(library().attend_backward, (q, k, v, weights, grad, *found, rows), shape)
    return found


def held_bytes(batch: int, heads: int, rows: int, keys: int) -> int:
    """Most memory held at once beyond inputs, output and gradients: the weights, kept for the
    backward pass, and there each thread's own of one head, with the gradient of its products."""
    scores = 2 * _filled(rows) * _filled(keys)
    return scores * (batch * heads + 2 * min(torch.get_num_threads(), heads))


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _filled(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
