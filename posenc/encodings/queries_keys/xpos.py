"""xPos: RoPE whose pairs also decay with distance."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.caches import Constants
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.torch_modes import extremes_if_readable
from posenc.encodings.queries_keys.rotate import rotate
from posenc.encodings.queries_keys.rotation import RotatedQueriesKeys, Rotation
from posenc.frequencies.scalings.scaling import Frequencies
from posenc.frequencies.series import inverse_frequencies

_HEADROOM = 256
"""Absolute value up to which channels of q and k do not overflow at the farthest position. Chosen,
to be far above channels in trained models."""


class XPos(Rotation):
    """Rotate as RoPE does and scale the score of pair t by zeta_t^(distance / scale_base).

    q *= zeta_t^((p - origin) / scale_base), k *= zeta_t^(-(p - origin) / scale_base),
    zeta_t = (2t/head_dim + 0.4) / 1.4

    Fast pairs decay most. Scores grow towards the future, so the encoding needs causal attention.
    The origin is fixed, so cached keys stay valid; positions far from it overflow the dtype.

    Args:
        head_dim: size of one head, even.
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1), as in the authors' code; False: (t, t + head_dim/2).
        scale_base: distance in tokens over which pair t decays by the factor zeta_t.
        origin: the position with scale 1; it does not change scores.

    Shapes: q (batch, num_heads, q_len, head_dim), k (batch, num_kv_heads, kv_len, head_dim) -> the
    same.
    Units: positions in tokens. Precision: exact angles, scaled in float32, rounded once.
    Raises: ValueError for an odd head_dim, and for a position further from the origin than
    `reach(dtype)` (checked on the CPU).
    Source: Sun et al. 2022, arXiv:2212.10554, section 3; github.com/microsoft/torchscale.

    >>> xpos = posenc.XPos(head_dim=64, interleaved=False)
    >>> q, k = xpos(torch.randn(1, 8, 10, 64), torch.randn(1, 8, 10, 64), torch.arange(10))
    >>> q.shape
    torch.Size([1, 8, 10, 64])
    """

    claims = replace(
        Rotation.claims, source="Sun et al. 2022, arXiv:2212.10554, section 3", causal_only=True
    )

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        scale_base: float = 512.0,
        origin: int = 0,
    ) -> None:
        super().__init__(head_dim, interleaved=interleaved)
        if head_dim < 2 or head_dim % 2:
            raise ValueError(f"XPos: head_dim must be even, got {head_dim}.")
        self.scale_base = scale_base
        self.origin = origin
        zeta = [(2 * t + 0.4 * head_dim) / (1.4 * head_dim) for t in range(head_dim // 2)]
        self._log_decay_per_token = Constants([math.log(z) / scale_base for z in zeta])
        self._set_frequencies(Frequencies(inverse_frequencies(head_dim, rope_theta)))
        limit = origin + self.reach(torch.float32) + 1
        self.claims = replace(self.claims, max_positions=limit)

    def reach(self, dtype: torch.dtype) -> int:
        """Return the largest distance from the origin, in tokens, at which q and k of this dtype do
        not overflow. For float64 it is that of float32, so that results in both dtypes can be
        compared."""
        largest_number = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        log_room = math.log(largest_number / _HEADROOM)
        return int(log_room / -self._log_decay_per_token.values[0])  # pair 0 decays fastest

    def transform(self, q: Tokens, k: Tokens) -> RotatedQueriesKeys:
        return self._rotate_and_fade(q, 1), self._rotate_and_fade(k, -1)

    def _rotate_and_fade(self, tokens: Tokens, sign: int) -> Tensor:
        """Return the vectors of tokens, rotated, and multiplied by zeta^((p - origin) / scale_base)
        for queries (sign=1), or by its inverse for keys (sign=-1)."""
        x = tokens.x
        assert x is not None
        self._check_width(x)
        self._check_reach(tokens.positions, x.dtype)
        cos, sin = self._fading_cos_sin(tokens, at_least_float32(x.dtype), sign)
        return rotate(x, cos, sin, interleaved=self.interleaved)

    def _key_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles at these positions, (len, pairs) in float64, times the
        factors 1 / zeta^((p - origin) / scale_base) of keys."""
        # Checked for float32: a cache of float16 would overflow earlier, to infinity.
        self._check_reach(positions, torch.float32)
        return self._fading_cos_sin(Tokens(None, positions), torch.float64, -1)

    def _fading_cos_sin(
        self, tokens: Tokens, dtype: torch.dtype, sign: int
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin at the positions of tokens, (..., pairs) in `dtype`, times zeta^((p -
        origin) / scale_base) for queries (sign=1), or times its inverse for keys (sign=-1)."""

        def compute() -> tuple[Tensor, Tensor]:
            cos, sin = self.cos_sin(tokens.positions_or_range, dtype, tokens.device)
            distance_from_origin = (tokens.positions - self.origin).double()[..., None]
            fade_factor = (
                (sign * distance_from_origin * self._log_decay_per_token.like(distance_from_origin))
                .exp()
                .to(dtype)
            )
            return cos * fade_factor, sin * fade_factor

        if not isinstance(tokens.positions_or_range, range):
            return compute()
        return self.computed_or_cached(
            (tokens.positions_or_range, dtype, tokens.device, sign), compute
        )

    def _check_reach(self, positions: Tensor, dtype: torch.dtype) -> None:
        """Raise ValueError for positions further from the origin than `reach(dtype)`. Positions
        that are not on the CPU are not checked."""
        extremes = extremes_if_readable(positions)
        if extremes is None:
            return
        largest_distance = max(abs(p - self.origin) for p in extremes)
        reach = self.reach(dtype)
        if largest_distance > reach:
            raise ValueError(
                f"XPos: a position is {largest_distance:.0f} tokens from the origin {self.origin}, "
                f"and {dtype} overflows beyond {reach}. Move the origin, raise scale_base or use a "
                "wider dtype."
            )
