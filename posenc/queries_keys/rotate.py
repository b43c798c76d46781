"""Rotate pairs of channels: what every rotary method does to q and k."""

from __future__ import annotations

import torch
from torch import Tensor

from posenc.encoding import at_least_float32


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of x (batch, heads, len, head_dim); the rest
    passes through.

    Pair t is (2t, 2t+1) if `interleaved`, else (t, t + rotary_dim/2). cos and sin are (len, pairs)
    or (batch, len, pairs); the rotation is computed in their dtype or x's, whichever is wider, and
    rounded once.
    """
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    rotary_dim = 2 * cos.shape[-1]
    wide = x[..., :rotary_dim].to(torch.promote_types(at_least_float32(x.dtype), cos.dtype))
    if interleaved:
        pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        out = torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        out = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    out = out.to(x.dtype)
    return out if rotary_dim == x.shape[-1] else torch.cat([out, x[..., rotary_dim:]], dim=-1)
