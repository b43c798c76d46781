"""Attention as most tests ask for it: queries and keys at the same positions."""

from typing import Any

import torch
from torch import Tensor

import posenc
from posenc import masks


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    encoding: Any,
    positions: Any = None,
    mask: masks.Mask | None = masks.causal,
    state: Tensor | None = None,
    **options: Any,
) -> Any:
    """Return posenc.attention for keys at `positions` (from 0 on if None), with their state. The
    queries are at the positions of the last keys."""
    positions = torch.arange(k.shape[2]) if positions is None else positions
    own, first = positions, k.shape[2] - q.shape[2]
    if first:
        own = positions[first:]
    if state is not None:
        options |= {"q_state": state[:, :, first:], "kv_state": state}
    return posenc.attention(
        q, k, v, encoding, q_positions=own, kv_positions=positions, mask=mask, **options
    )


def cells(order: Tensor, axes: int, side: int) -> Tensor:
    """Return positions of `axes` components, (len, axes), for tokens numbered by `order`, (len):
    row by row in a grid of `side` columns; the third component counts up. One axis: the numbers."""
    if axes == 1:
        return order
    return torch.stack([order // side, order % side, order], dim=-1)[..., :axes].contiguous()


def decoded(layer: posenc.Attention, x: Tensor) -> Tensor:
    """Return the layer's output, computed token by token with a cache."""
    at, cache = torch.arange(x.shape[1]).split(1), posenc.KVCache()
    return torch.cat([layer(x[:, i], i, cache=cache, mask=masks.causal) for i in at], dim=1)
