"""What vectors by distance add to the values, by C where there is a compiler: only the weights of
near keys are computed, and the others have the rest of 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.numbers import native
from posenc.numbers.tracking import followed

SOURCE = Path(__file__).with_name("near.c")
FURTHEST = 4096
"""The most near distances whose weights the stack holds."""


def applies(table: Tensor) -> bool:
    """Whether C can read the vectors: float32 on the CPU, and nobody follows what is done."""
    plain = table.dtype == torch.float32 and table.device.type == "cpu" and not followed(table)
    return plain and len(table) <= FURTHEST and _library() is not None


def near_values(
    q: Tensor, k: Tensor, scale: float, added: Tensor, lse: Tensor, table: Tensor, shift: int
) -> Tensor:
    """sum over j of weights[i, j] * table[min(D, len(table) - 1)], D = shift + i - j, where no key
    is later than a query sees: (batch, num_heads, rows, width).

    weights = exp(scale * q . k + added - lse), which sum to 1 in a row, or to 0 where lse is -inf.

    q (batch, num_heads, rows, width), k (batch, num_kv_heads, keys, width), added (batch,
    num_heads, rows, keys), lse (batch, num_heads, rows), table (distances, width); float32, q and
    k parts along the third axis of tensors in one piece.
    """
    batch, heads, rows, width = q.shape
    for name, t in (("q", q), ("k", k)):
        if t.stride()[2:] != (width, 1) or t.stride(0) != t.shape[1] * t.stride(1):
            raise ValueError(f"{name} must be a part of a tensor in one piece: {t.stride()}")
    given = (q, k, *(t.contiguous() for t in (added, lse, table)))
    out = q.new_empty(batch, heads, rows, width)
    steps = heads // k.shape[1], q.stride(1), k.stride(1)
    sizes = (shift, len(table) - 1, *steps, rows, k.shape[2], width)
    native.run(_library().near_values, batch * heads, out, *given, *sizes, float(scale))
    return out


def _library() -> Any:
    return native.load(SOURCE, ("near_values",))
