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
    """posenc.attention over keys at `positions`, from 0 on if there are none, with their state;
    the queries are those of the last tokens."""
    positions = torch.arange(k.shape[2]) if positions is None else positions
    own, first = positions, k.shape[2] - q.shape[2]
    if first:
        own = positions[first:]
    if state is not None:
        options |= {"q_state": state[:, :, first:], "kv_state": state}
    return posenc.attention(
        q, k, v, encoding, q_positions=own, kv_positions=positions, mask=mask, **options
    )


def decoded(layer: posenc.Attention, x: Tensor) -> Tensor:
    """The layer's output token by token, with a cache."""
    at, cache = torch.arange(x.shape[1]).split(1), posenc.KVCache()
    return torch.cat([layer(x[:, i], i, cache=cache, mask=masks.causal) for i in at], dim=1)
