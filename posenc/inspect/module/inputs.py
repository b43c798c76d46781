"""Make inputs for a foreign module: positions, and contents that distinguish them."""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEADS = 2
"""Heads of a module that states none: more than one, so that they are not mistaken for tokens."""


@dataclass(frozen=True)
class Inputs:
    """Inputs of one forward call of the module under inspection.

    positions: (len) or (batch, len), int64. width: width of one token, or of one head.
    probe: the content (width) of every token; None: random, and the same for all tokens, so that
        rows can differ by position only. changed: index of a token that has another content.
    heads: heads of queries, keys and scores.
    last: the number of tokens at the end that are queries; None: all.
    offset: a number that the module adds to the positions it counts itself, as after a cache.
    starts: (batch), the index of each sequence's first token that is not padding.
    """

    positions: Tensor
    width: int = 64
    dtype: torch.dtype = torch.float32
    probe: Tensor | None = None
    changed: int | None = None
    heads: int = HEADS
    last: int | None = None
    offset: int = 0
    starts: Tensor | None = None

    @property
    def count(self) -> int:
        return self.positions.shape[-1]

    @property
    def batch(self) -> int:
        rows = 1 if self.positions.ndim == 1 else self.positions.shape[0]
        return rows if self.starts is None else len(self.starts)

    def content(self, name: str) -> Tensor:
        """Return content (batch, len, width) that bfloat16 represents exactly, different for each
        name."""
        if self.probe is None:
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            row = torch.randn(self.width, generator=seed).bfloat16()
        else:
            row = self.probe
        rows = row.to(self.dtype).repeat(self.batch, self.count, 1)
        if self.changed is not None:
            rows[:, self.changed] = -2 * rows[:, self.changed].flip(-1) + 1
        return rows

    def value(self, role: str, layout: str, name: str) -> Any:
        """Return the value for an argument of this role, see posenc.inspect.module.form."""
        queries = slice(None) if self.last is None else slice(self.count - self.last, None)
        match role:
            case "positions" | "q_positions" | "kv_positions":
                given = self.positions[..., queries] if role == "q_positions" else self.positions
                return given if layout == "n" or given.ndim == 2 else given.expand(1, -1)
            case "content" | "q" | "k":
                rows = self.content(name)[:, queries] if role == "q" else self.content(name)
                if layout in ("bnw", "nbw"):
                    return rows if layout == "bnw" else rows.transpose(0, 1)
                split = rows[:, :, None].repeat(1, 1, self.heads, 1)
                return split if layout == "bnhw" else split.transpose(1, 2)
            case "q_len":
                return self.count if self.last is None else self.last
            case "kv_len" | "length":
                return self.count
            case "tokens":
                return torch.full((self.batch, self.count), 5)
            case "scores":
                return torch.zeros(1, self.heads, self.count, self.count, dtype=self.dtype)
            case "mask":
                return torch.ones(self.batch, self.count, dtype=torch.int64)
            case "offset":
                return self.offset
            case "starts":
                return self.starts
            case "dtype":
                return self.dtype
            case "device":
                return torch.device("cpu")
        raise AssertionError(role)
