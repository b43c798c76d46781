"""Rotary value embeddings: values are rotated like keys, and outputs back."""

from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import (
    Cached,
    CachedPositions,
    ModelShape,
    Output,
    PositionEncoding,
    QueriesKeys,
    Values,
)
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.queries_keys.rope import RoPE
from posenc.encodings.queries_keys.rotation import Rotation
from posenc.positions.tokens import Positions


class RoVE(PositionEncoding):
    """Rotate values by their positions, and the output back by the query's.

    out_i = R_i^T sum_j weight[i, j] R_j v_j

    A value then depends on its distance from the query. DeepSeek-V4 does this with one tensor for
    keys and values, and DecoupledRoPE(interleaved=True) as the rotation.

    Args:
        rotation: RoPE, DecoupledRoPE, MRoPE or AxialRoPE, for values of its head_dim. Values are
            rotated without the attention factor of a scaling.
        rotate_queries_keys: True: rotate queries and keys, too; False: values only (VO-RoPE).

    Shapes: v (batch, num_kv_heads, kv_len, head_dim) -> the same; cached values are rotated.
    Units, precision: as the rotation; the output is rounded once more.
    Raises: TypeError for an encoding that does not rotate, or does more, such as XPos or ReRoPE;
        ValueError for values of another width.
    Source: Garcia-Castellanos et al. 2026, arXiv:2606.11275; Su 2025, kexue.fm/archives/10862.

    >>> rove = posenc.RoVE(posenc.RoPE(16, interleaved=False))
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> posenc.attention(q, k, v, rove, q_positions=range(6), kv_positions=range(6)).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = Claims(places=(2, 4), source="Garcia-Castellanos et al. 2026, arXiv:2606.11275")

    def __init__(self, rotation: PositionEncoding, *, rotate_queries_keys: bool = True) -> None:
        super().__init__()
        cls = type(rotation)
        # Values are rotated by `cos_sin` alone. A class with a `transform` of its own, such as
        # XPos, does more than that to keys, and one with `passes` of its own has several positions
        # for each token.
        only_rotates = isinstance(rotation, Rotation) and cls.transform is Rotation.transform
        if not only_rotates or cls.passes is not PositionEncoding.passes:
            raise TypeError(
                "RoVE: rotation must be RoPE, DecoupledRoPE, MRoPE or AxialRoPE, got "
                f"{cls.__name__}, which does more to queries and keys than to rotate them."
            )
        self.rotation = rotation
        self.rotate_queries_keys = rotate_queries_keys
        self._prepared_rotations: tuple[Rotation, ...] = ()
        self.claims = replace(
            rotation.claims,
            places=self.claims.places if rotate_queries_keys else (4,),
            source=self.claims.source,
            own_scale=rotation.claims.own_scale and rotate_queries_keys,
        )

    @classmethod
    @explain_misfits
    def from_shape(
        cls,
        shape: ModelShape,
        *,
        rotation: PositionEncoding | None = None,
        rotate_queries_keys: bool = True,
        **options: Any,
    ) -> Self:
        """Build the encoding for a model. If `rotation` is None, the rotation is a RoPE, built with
        the other options."""
        if rotation is None:
            return cls(RoPE.from_shape(shape, **options), rotate_queries_keys=rotate_queries_keys)
        return super().from_shape(
            shape, rotation=rotation, rotate_queries_keys=rotate_queries_keys, **options
        )

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = self.shallow_copy()
        prepared._prepared_rotations = (self._rotation_in_use.prepare(positions, length),)
        return prepared

    @property
    def _rotation_in_use(self) -> Rotation:
        """Return the rotation to compute with: the prepared one if this encoding was prepared."""
        return self._prepared_rotations[0] if self._prepared_rotations else self.rotation  # type: ignore[return-value]

    def scale(self, head_dim: int) -> float:
        # A rotation's factor of the scores belongs to queries and keys that it has rotated.
        return (
            self.rotation.scale(head_dim) if self.rotate_queries_keys else super().scale(head_dim)
        )

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        return (
            self._rotation_in_use.transform(q, k)
            if self.rotate_queries_keys
            else super().transform(q, k)
        )

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return self._rotation_in_use.move_keys(k, before, after) if self.rotate_queries_keys else k

    def move_values(self, v: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return self._rotation_in_use.rotate_further(
            v,
            self._cos_sin_without_factor(before, torch.float64),
            self._cos_sin_without_factor(after, torch.float64),
        )

    def transform_values(self, v: Tokens) -> Values:
        return self._rotate_by_positions(v, is_forward=True)

    def transform_output(self, out: Tokens) -> Output:
        return self._rotate_by_positions(out, is_forward=False)

    def _rotate_by_positions(self, tokens: Tokens, *, is_forward: bool) -> Tensor:
        """Return the vectors of tokens, rotated by the angles of their positions; by the negative
        angles if `is_forward` is False. Raise ValueError unless they are head_dim wide."""
        x = tokens.x
        rotation = self._rotation_in_use
        assert x is not None
        if x.shape[-1] != rotation.head_dim:
            raise ValueError(
                f"RoVE: values must have the rotation's head_dim={rotation.head_dim}, got "
                f"{tuple(x.shape)}."
            )
        cos, sin = self._cos_sin_without_factor(
            tokens.positions_or_range, at_least_float32(x.dtype), tokens.device
        )
        (rotated,) = rotation.rotate_channels((x,), cos, sin if is_forward else -sin)
        return rotated

    def _cos_sin_without_factor(
        self, positions: Positions, dtype: torch.dtype, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotation at positions, without its attention factor: cos^2 +
        sin^2 = 1. `device` is used if positions are a range."""
        rotation = self._rotation_in_use
        cos, sin = rotation.cos_sin(positions, dtype, device)
        if rotation.attention_factor == 1:
            return cos, sin
        factor = torch.hypot(cos, sin)  # not attention_factor of every token: longrope exempts some
        return cos / factor, sin / factor
