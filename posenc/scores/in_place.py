"""What CoPE and FIRE add to scores on the CPU, by C where there is a compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posenc.numbers import native
from posenc.numbers.tracking import watched

SOURCE = Path(__file__).with_name("pairs.c")
FUNCTIONS = ("count_gates", "add_network")
UNITS = 1024
"""The most hidden units whose values the stack holds."""


def applies(scores: Tensor, *others: Tensor) -> bool:
    """Whether C can add to these scores: float32 on the CPU, in one piece, and nobody watches."""
    plain = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in (scores, *others))
    return plain and scores.is_contiguous() and not watched() and _library() is not None


def count_gates(scores: Tensor, gates: Tensor, table: Tensor, mask: Tensor | None) -> Tensor:
    """Add to each score what the table says at the number of open gates from its key to the last.

    scores, gates (batch, num_heads, rows, keys); table (batch, num_heads, rows, positions); mask
    broadcasts to the scores.
    """
    batch, heads, rows, keys = scores.shape
    gates, table = gates.contiguous(), table.contiguous()
    visible = native.in_rows(mask, scores.shape)
    strides = (0, 0, 0) if visible is None else visible.stride()[:3]
    native.run(
        _library().count_gates, batch * heads * rows, scores, gates, table, visible, strides,
        table.shape[-1], heads, rows, keys,
    )  # fmt: skip
    return scores


def add_network(
    scores: Tensor, share: Tensor, weight: Tensor, limit: Tensor, out: Tensor, base: Tensor
) -> Tensor:
    """scores[b, h, i, j] += out[h] . max(weight * share[b, i, j], limit) + base[h]

    share (batch or 1, rows, keys); weight, limit (units,); out (num_heads, units); base
    (num_heads,).
    """
    batch, heads, rows, keys = scores.shape
    given = [t.contiguous() for t in (share, weight, limit, out, base)]
    sizes = len(weight), len(share), heads, rows, keys
    native.run(_library().add_network, batch * rows, scores, *given, *sizes)
    return scores


def _library() -> Any:
    return native.load(SOURCE, FUNCTIONS)
