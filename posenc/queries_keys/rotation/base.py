"""What all methods share that rotate q and k by angles which depend only on the positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.numbers.angles import Angles
from posenc.numbers.precision import at_least_float32
from posenc.numbers.tracking import followed, transformed
from posenc.positions import Positions, Remembered, run_start, same, version
from posenc.queries_keys.query_key import QueryKeyEncoding
from posenc.queries_keys.rope_scaling import Frequencies
from posenc.queries_keys.rotation.rotate import rotate_together
from posenc.terms.tokens import Tokens

KEPT = 2
"""Tables that an encoding keeps from its last calls: those of queries and of keys."""
MANY = 256
"""Positions from which it pays to ask whether they are consecutive."""
MOST_KEPT = 1 << 20
"""Larger tables are made at each call: numbers in one of them, 4 MB."""


Turned = tuple[
    Float[Tensor, "batch num_heads {len(q)} {self.head_dim}"],
    Float[Tensor, "batch num_kv_heads {len(k)} {self.head_dim}"],
]
"""What becomes of `q` and `k`, which are Tokens, where their width stays."""
Table = Float[Tensor, "*tokens {len(self.angles)}"]


class Rotation(QueryKeyEncoding):
    """Rotate pairs of channels of q and k; a subclass calls `_rotate_by` with its frequencies.

    `interleaved`: pairs are (2t, 2t+1); False: (t, t + rotary_dim/2).
    """

    def __init__(self, head_dim: int, *, interleaved: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.interleaved = interleaved
        self._ready: tuple[tuple[Remembered, Tensor, Tensor], ...] = ()
        self._last: tuple[tuple[Remembered, Tensor, Tensor], ...] = ()

    def _rotate_by(self, frequencies: Frequencies, axes: Sequence[int] | None = None) -> None:
        """Use these frequencies; pair t turns with component axes[t] of the positions."""
        self.angles = Angles(frequencies.inv_freq, axes)
        self.attention_factor = frequencies.attention_factor
        self._ready = self._last = ()

    def cos_sin(
        self, positions: Positions, dtype: torch.dtype = torch.float32
    ) -> tuple[Table, Table]:
        """cos and sin of every pair's angle, each (len, pairs) or (batch, len, pairs), times
        attention_factor."""
        # What calls have left here must not decide what is compiled.
        kept = () if torch.compiler.is_compiling() else self._last
        for ready, cos, sin in (*self._ready, *kept):
            if dtype == cos.dtype and ready.fits(positions):
                return cos, sin
        cos, sin = self._tables(positions, dtype)
        if self._may_keep(positions, cos):  # the next call is likely to ask for them again
            self._last = ((Remembered(positions), cos, sin), *self._last[: KEPT - 1])
        return cos, sin

    def forget_tables(self) -> None:
        """Let go of the tables that earlier calls made, which serve the same positions again."""
        self._last = ()

    def _may_keep(self, positions: Tensor, cos: Tensor) -> bool:
        if torch.compiler.is_compiling() or transformed() or type(cos) is not Tensor:
            return False
        if cos.requires_grad or cos.is_inference():  # a later backward pass could not use them
            return False
        counted = positions.device.type == "cpu" or version(positions) is not None
        return counted and cos.numel() <= MOST_KEPT

    def _tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        plain = not followed(positions) and positions.device.type == "cpu"  # only then its length
        long = plain and positions.ndim == 1 and len(positions) >= MANY and self.angles.axes is None
        first = run_start(positions) if long else None
        if first is None:
            return self.angles.cos_sin(positions, dtype, self.attention_factor)
        count, device = len(positions), positions.device
        return self.angles.of_run(first, count, device, dtype, self.attention_factor)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = self.shallow_copy()
        prepared._ready = ((Remembered(positions), *self.cos_sin(positions)),)
        return prepared

    def transform(self, q: Tokens, k: Tokens) -> Turned:
        assert q.x is not None and k.x is not None
        self._check(q.x)
        self._check(k.x)
        dtype = at_least_float32(q.x.dtype)
        cos, sin = self.cos_sin(q.positions, dtype)
        if same(q.positions, k.positions):
            new_q, new_k = self._turn((q.x, k.x), cos, sin)
            return new_q, new_k
        (new_q,) = self._turn((q.x,), cos, sin)
        (new_k,) = self._turn((k.x,), *self.cos_sin(k.positions, dtype))
        return new_q, new_k

    def _turn(self, xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> Sequence[Tensor]:
        return rotate_together(xs, cos, sin, interleaved=self.interleaved)

    def _check(self, x: Tensor) -> None:
        if x.shape[-1] != self.head_dim:
            raise ValueError(
                f"{type(self).__name__}: built for head_dim={self.head_dim}, "
                f"got q or k with shape {tuple(x.shape)}."
            )
