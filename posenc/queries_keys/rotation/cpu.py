"""Rotation of channel pairs in one pass on the CPU, by rope.c: half a second to compile, once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.numbers import native

PAYS_FROM = 1 << 15
"""Numbers in q and k from which the kernel runs. Below, both ways take microseconds, and a program
with only small tensors never waits for a compiler."""

PIECE = 1 << 10
"""Bytes of tokens, all their heads, that are rotated head by head where heads lie inside tokens."""
TILE = 1 << 17
"""Cosines of one head that are used before the next head, which then reads them from a cache."""

_SOURCE = Path(__file__).with_name("rope.c")
_FUNCTIONS = {torch.float32: "rotate_f32", torch.bfloat16: "rotate_bf16"}


def _library() -> Any:
    return native.load(_SOURCE, tuple(_FUNCTIONS.values()))


def takes(xs: Sequence[Tensor], cos: Tensor) -> bool:
    """Whether `rotate` runs each of these and pays."""
    return (
        sum(x.numel() for x in xs) >= PAYS_FROM
        and cos.dtype == torch.float32
        and all(x.device.type == "cpu" and x.dtype in _FUNCTIONS for x in xs)
        and _library() is not None
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The first 2 * pairs channels of x (batch, heads, len, head_dim) rotated; the
    rest passes through.

    cos and sin are (1, len, pairs) or (batch, 1, len, pairs), float32. x is float32 or bfloat16, of
    any strides. Computed in float32, rounded once.
    """
    library = _library()
    assert library is not None, "ask takes() first"
    x = x if x.stride(-1) == 1 else x.contiguous()  # a gradient of k comes with its tokens inside
    cos, sin, out = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
    if out.stride(-1) != 1:
        out = x.new_empty(x.shape)
    native.on_huge_pages(out)
    batch, heads, length, head_dim = x.shape
    pairs = cos.shape[-1]
    threads = torch.get_num_threads()
    # Walk memory in its own order: projections leave heads inside tokens.
    inside = x.stride(1) < x.stride(2)
    kept = PIECE // (heads * head_dim * x.itemsize) if inside else TILE // max(1, pairs)
    tile = max(1, min(kept, -(-length // threads)))
    table_batch = length * pairs if cos.ndim == 4 and cos.shape[0] > 1 else 0
    native.run(
        getattr(library, _FUNCTIONS[x.dtype]), batch * -(-length // tile), x, out, cos, sin, heads,
        length, tile, pairs, head_dim - 2 * pairs, x.stride()[:3], out.stride()[:3], table_batch,
        interleaved,
    )  # fmt: skip
    return out
