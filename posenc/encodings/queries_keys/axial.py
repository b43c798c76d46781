"""RoPE over rows and columns: axial RoPE with presets of vision models, and RoPE-Mixed."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from posenc.arguments import explain_misfits
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import Cached, CachedPositions
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.tensor_views import repeat_kv_heads
from posenc.encodings.numerics.torch_modes import extremes_if_readable
from posenc.encodings.queries_keys.rotate import rotate
from posenc.encodings.queries_keys.rotation import (
    QueryKeyEncoding,
    RotatedQueriesKeys,
    Rotation,
    check_keys,
)
from posenc.frequencies.scalings.scaling import Frequencies
from posenc.frequencies.series import DECIMAL_CONTEXT, TWO_PI, inverse_frequencies
from posenc.positions import move_placeless_to_origin


class AxialRoPE(Rotation):
    """Rotate one half of the pairs by the token's row and the other by its column.

    angle = row * rope_theta^(-4t/head_dim) or column * rope_theta^(-4t/head_dim),
    t < head_dim / 4

    Tokens whose row or column is NaN (class and register tokens, see posenc.positions.grid) are not
    rotated. `rope_vit`, `dinov3` and `pixtral` build the variants of these models.

    Args:
        head_dim: size of one head, a multiple of 4.
        rope_theta: base of the geometric series of frequencies.
        interleaved: pairs are (2t, 2t+1); False: (t, t + head_dim/2).
        column_first: rotate the first half of the pairs by the column.
        alternating: use one series rope_theta^(-2t/head_dim), even terms for the row and odd terms
            for the column; False: the same frequencies for both.
        frequencies_in_turns: frequencies are full turns per unit; False: radians per unit. True is
            for coordinates within -1 .. 1, see posenc.positions.normalized_grid.

    Shapes: positions (len, 2) or (batch, len, 2) of (row, column), integer or real; q (batch,
    num_heads, q_len, head_dim) and k (batch, num_kv_heads, kv_len, head_dim) -> the same.
    Units: patches, or any unit. Precision: exact angles, rotated in float32, rounded once.
    Raises: ValueError if head_dim is not a multiple of 4.
    Source: Heo et al. 2024, arXiv:2403.13298, section 3.2.

    >>> rope = posenc.AxialRoPE(head_dim=64, interleaved=False)
    >>> cells = posenc.positions.grid(3, 4)
    >>> q, k = rope(torch.randn(1, 8, 12, 64), torch.randn(1, 8, 12, 64), cells)
    >>> q.shape
    torch.Size([1, 8, 12, 64])
    """

    claims = replace(
        Rotation.claims, source="Heo et al. 2024, arXiv:2403.13298, section 3.2", num_axes=2
    )

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 100.0,
        *,
        interleaved: bool,
        column_first: bool = False,
        alternating: bool = False,
        frequencies_in_turns: bool = False,
    ) -> None:
        super().__init__(head_dim, interleaved=interleaved)
        _check_multiple_of_4(type(self).__name__, head_dim)
        pairs_per_axis = head_dim // 4
        row_axis = 0
        column_axis = 1
        first_axis, second_axis = (
            (column_axis, row_axis) if column_first else (row_axis, column_axis)
        )
        if alternating:
            joint_series = inverse_frequencies(head_dim, rope_theta)
            # The row has the terms with even indices, the column the others, whichever comes first.
            inv_freq = joint_series[first_axis::2] + joint_series[second_axis::2]
        else:
            series_of_one_axis = inverse_frequencies(head_dim // 2, rope_theta)
            inv_freq = series_of_one_axis + series_of_one_axis
        if frequencies_in_turns:
            self.claims = replace(self.claims, coordinates="normalized")
            inv_freq = tuple(DECIMAL_CONTEXT.multiply(f, TWO_PI) for f in inv_freq)
        axes = [first_axis] * pairs_per_axis + [second_axis] * pairs_per_axis
        self._set_frequencies(Frequencies(inv_freq), axes)

    @classmethod
    @explain_misfits
    def rope_vit(cls, head_dim: int, rope_theta: float = 100.0) -> "AxialRoPE":
        """Build the variant of RoPE-ViT: interleaved pairs, the first half for columns."""
        return cls(head_dim, rope_theta, interleaved=True, column_first=True)

    @classmethod
    @explain_misfits
    def dinov3(cls, head_dim: int, rope_theta: float = 100.0) -> "AxialRoPE":
        """Build DINOv3's variant: half-split pairs, rows first, for coordinates from -1 to 1, see
        posenc.positions.normalized_grid."""
        return cls(head_dim, rope_theta, interleaved=False, frequencies_in_turns=True)

    @classmethod
    @explain_misfits
    def pixtral(cls, head_dim: int, rope_theta: float = 10000.0) -> "AxialRoPE":
        """Build Pixtral's variant: half-split pairs, alternately for rows and columns."""
        return cls(head_dim, rope_theta, interleaved=False, alternating=True)


class MixedRoPE(QueryKeyEncoding):
    """Rotate each pair by the position along a learned direction in the plane: RoPE-Mixed.

    angle[h, t] = row * weight[0, h, t] + column * weight[1, h, t]

    Tokens whose row or column is NaN (class tokens, see posenc.positions.grid) are not rotated.

    Args:
        head_dim: size of one head, a multiple of 4.
        num_kv_heads: number of key/value heads; each has its own frequencies, shared by its query
            heads.
        rope_theta: base of the initial magnitudes rope_theta^(-4t/head_dim), each for two
            orthogonal directions; a random angle rotates the directions of each head.
        interleaved: pairs are (2t, 2t+1), as in the authors' code; False: (t, t + head_dim/2).

    Shapes: weight (2, num_kv_heads, head_dim/2); positions (len, 2) or (batch, len, 2) of (row,
    column).
    Units: radians per patch. Precision: angles in float64, rotated in float32, rounded once.
    Raises: ValueError if head_dim is not a multiple of 4, or k has another shape.
    Source: Heo et al. 2024, arXiv:2403.13298, section 3.3; github.com/naver-ai/rope-vit.

    >>> rope = posenc.MixedRoPE(head_dim=64, num_kv_heads=8)
    >>> cells = posenc.positions.grid(3, 4)
    >>> q, k = rope(torch.randn(1, 8, 12, 64), torch.randn(1, 8, 12, 64), cells)
    >>> rope.weight.shape
    torch.Size([2, 8, 32])
    """

    claims = Claims(
        places=(2,),
        source="Heo et al. 2024, arXiv:2403.13298, section 3.3",
        num_axes=2,
        scope="layer",
    )

    def __init__(
        self,
        head_dim: int,
        num_kv_heads: int,
        rope_theta: float = 10.0,
        *,
        interleaved: bool = True,
    ) -> None:
        super().__init__()
        _check_multiple_of_4(type(self).__name__, head_dim)
        self.head_dim = head_dim
        self.num_kv_heads = num_kv_heads
        self.rope_theta = rope_theta
        self.interleaved = interleaved
        self.weight = nn.Parameter(torch.empty(2, num_kv_heads, head_dim // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        frequencies = inverse_frequencies(self.head_dim // 2, self.rope_theta)
        magnitude = torch.tensor([float(f) for f in frequencies], device=self.weight.device)
        # One random direction per head, and the one at a right angle to it, with all magnitudes.
        angle = torch.rand(self.num_kv_heads, 1, device=self.weight.device) * 2 * math.pi
        angle = angle.expand(-1, len(magnitude))
        angle = torch.cat([angle, angle + math.pi / 2], -1)  # (num_kv_heads, pairs)
        # The authors' x is the column.
        along_row = angle.sin()
        along_column = angle.cos()
        self.weight.copy_(torch.stack([along_row, along_column]) * magnitude.repeat(2))

    def transform(self, q: Tokens, k: Tokens) -> RotatedQueriesKeys:
        assert q.x is not None and k.x is not None
        check_keys(self, k.x)
        return self._rotate(q.x, q.positions), self._rotate(k.x, k.positions)

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return self._rotate(k, after - before)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x (batch, heads, len, head_dim) rotated by the learned angles of its positions
        (len, 2) or (batch, len, 2)."""
        dtype = torch.promote_types(at_least_float32(x.dtype), self.weight.dtype)
        positions = move_placeless_to_origin(positions)
        _check_reach(positions)
        row_weight, column_weight = self.weight.double()[:, :, None]  # (num_kv_heads, 1, pairs)
        # (..., 1, len, 1), to broadcast over heads and pairs
        row, column = positions.double()[..., None, :, None, :].unbind(-1)
        angle = row * row_weight + column * column_weight
        # (batch, num_kv_heads, len, pairs), then one row of `rotate`'s batch for each head
        batch, num_heads = x.shape[:2]
        angle = angle.expand(batch, *angle.shape[-3:])
        angle = repeat_kv_heads(angle, num_heads).flatten(0, 1)
        cos = angle.cos().to(dtype)
        sin = angle.sin().to(dtype)
        rotated = rotate(x.flatten(0, 1)[:, None], cos, sin, interleaved=self.interleaved)
        return rotated.view_as(x)


_FARTHEST = 2**32
"""Absolute row or column, from which on float64 rounds position times weight by more than 1e-6
radians."""


def _check_reach(positions: Tensor) -> None:
    """Raise ValueError for a row or column of 2^32 or more in absolute value. Positions that are
    not on the CPU are not checked."""
    low, high = extremes_if_readable(positions) or (0, 0)
    if not (-_FARTHEST < low and high < _FARTHEST):
        raise ValueError(
            "MixedRoPE: positions must be below 2^32; beyond it float64 rounds learned angles."
        )


def _check_multiple_of_4(name: str, head_dim: int) -> None:
    """Raise ValueError unless head_dim is a multiple of 4, so that each axis gets half of the
    pairs."""
    if head_dim < 4 or head_dim % 4:
        raise ValueError(f"{name}: head_dim must be a multiple of 4, got {head_dim}.")
