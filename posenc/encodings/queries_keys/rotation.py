"""Base classes of encodings that change q and k, and of those that rotate them by position."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.check_inputs import query_and_key_tokens, transposed_if_bthd
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.position_encoding import Cached, CachedPositions, PositionEncoding
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.exact_frequencies import ExactFrequencies
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.numerics.torch_modes import outside_inference_mode
from posenc.encodings.queries_keys.rotate import rotate_together
from posenc.frequencies.scalings.scaling import Frequencies
from posenc.positions.tokens import (
    Positions,
    PositionTensor,
    RememberedPositions,
    are_known_equal,
    as_tensor,
    move_placeless_to_origin,
)


class QueryKeyEncoding(PositionEncoding):
    """Base class of encodings that change q and k by their positions; a subclass defines
    `transform`."""

    claims = Claims(places=(2,), source="see the subclass")

    @explain_misfits
    def forward(
        self,
        q: Float[Tensor, "batch _ _ head_dim"],
        k: Float[Tensor, "batch _ _ head_dim"],
        positions: Positions,
        *,
        layout: str = "bhtd",
    ) -> tuple[Float[Tensor, "batch _ _ width"], Float[Tensor, "batch _ _ width"]]:
        """Return q and k of the same tokens, transformed, for use outside of posenc.attention.

        q (batch, num_heads, len, head_dim) and k (batch, num_kv_heads, len, head_dim) may come back
        wider. With layout="bthd" axes 1 and 2 are swapped in arguments and results.
        Raises: TypeError or ValueError for vectors, positions or a layout that do not fit.
        """
        caller = type(self).__name__
        q, k = transposed_if_bthd(caller, layout, q, k)
        new_q, new_k = self.transform(
            *query_and_key_tokens(caller, q, k, positions, self.claims.num_axes)
        )
        return transposed_if_bthd(caller, layout, new_q, new_k)


def check_keys(encoding: Any, k: Tensor) -> None:
    """Raise ValueError unless k (batch, heads, len, width) has the encoding's num_kv_heads as heads
    and its head_dim as width."""
    if k.shape[1] != encoding.num_kv_heads or k.shape[-1] != encoding.head_dim:
        raise ValueError(
            f"{type(encoding).__name__}: built for {encoding.num_kv_heads} key/value heads of "
            f"{encoding.head_dim}, got k with shape {tuple(k.shape)}."
        )


RotatedQueriesKeys = tuple[
    Float[Tensor, "batch num_heads {len(q)} {self.head_dim}"],
    Float[Tensor, "batch num_kv_heads {len(k)} {self.head_dim}"],
]
"""Rotated queries and keys, as wide as before."""
Vectors = Sequence[Float[Tensor, "batch _ len width"]]
CosOrSin = Float[Tensor, "*tokens pairs"]
Table = Float[Tensor, "*tokens {len(self.exact_frequencies)}"]


class Rotation(QueryKeyEncoding):
    """Base class of encodings that rotate pairs of channels of q and k by angles position *
    frequency. A subclass sets the frequencies with `_set_frequencies`.

    interleaved: pairs are (2t, 2t+1); False: (t, t + rotary_dim/2).
    """

    def __init__(self, head_dim: int, *, interleaved: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.interleaved = interleaved
        # Tables of positions in tensors, found by comparing the positions. Those of ranges, which
        # can be keys of a dict, are in the `_table_cache` of a prepared encoding.
        self._remembered_cos_sin: tuple[tuple[RememberedPositions, Tensor, Tensor], ...] = ()

    def _set_frequencies(self, frequencies: Frequencies, axes: Sequence[int] | None = None) -> None:
        """Set the frequencies of all pairs, and forget tables of earlier ones. axes: if positions
        have components, the index of the component that rotates each pair."""
        self.exact_frequencies = ExactFrequencies(frequencies.inv_freq, axes)
        self.attention_factor = frequencies.attention_factor
        self._remembered_cos_sin = ()

    def cos_sin(
        self,
        positions: Positions,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> tuple[Table, Table]:
        """Return cos and sin of every pair's angle, each (len, pairs) or (batch, len, pairs), times
        attention_factor. `device` is used if positions are a range."""
        if isinstance(positions, range):
            key = positions, dtype, device
            return self.computed_or_cached(
                key, lambda: self._compute_cos_sin(as_tensor(positions, device), dtype)
            )
        for remembered_positions, cos, sin in self._remembered_cos_sin:
            if dtype == cos.dtype and remembered_positions.fits(positions):
                return cos, sin
        return self._compute_cos_sin(positions, dtype)

    def _compute_cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin as `cos_sin` does, for positions in a tensor, without reading stored
        tables."""
        if self.exact_frequencies.axes is not None:  # tokens without a place are not rotated
            positions = move_placeless_to_origin(positions)
        return self.exact_frequencies.cos_sin(positions, dtype, self.attention_factor)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = self.with_table_cache()
        if isinstance(positions, Tensor):
            prepared._remembered_cos_sin = (self.cos_sin_to_remember(positions),)
        return prepared

    def cos_sin_to_remember(
        self, positions: PositionTensor
    ) -> tuple[RememberedPositions, Table, Table]:
        """Return (positions, cos, sin) with a copy of the positions, as an entry of the
        `_remembered_cos_sin` of a prepared encoding."""
        with outside_inference_mode():
            return RememberedPositions(positions), *self.cos_sin(positions)

    def transform(self, q: Tokens, k: Tokens) -> RotatedQueriesKeys:
        assert q.x is not None and k.x is not None
        self._check_width(q.x)
        self._check_width(k.x)
        dtype = at_least_float32(q.x.dtype)
        cos, sin = self.cos_sin(q.positions_or_range, dtype, q.device)
        if are_known_equal(q.positions_or_range, k.positions_or_range):
            new_q, new_k = self.rotate_channels((q.x, k.x), cos, sin)
            return new_q, new_k
        (new_q,) = self.rotate_channels((q.x,), cos, sin)
        (new_k,) = self.rotate_channels(
            (k.x,), *self.cos_sin(k.positions_or_range, dtype, k.device)
        )
        return new_q, new_k

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        cls = type(self)
        # A subclass with a `transform` of its own, which may do more than rotate, must tell by
        # `_key_cos_sin` what that does to keys. Otherwise keys cannot be moved.
        has_own_transform = cls.transform is not Rotation.transform
        has_own_key_cos_sin = cls._key_cos_sin is not Rotation._key_cos_sin
        if has_own_transform and not has_own_key_cos_sin:
            return super().move_keys(k, before, after)
        return self.rotate_further(k, self._key_cos_sin(before), self._key_cos_sin(after))

    def _key_cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin in float64, each (len, pairs), by which `transform` multiplies keys at
        these positions. A subclass whose `transform` does more to keys than to rotate them
        overrides this method."""
        return self.cos_sin(positions, torch.float64)

    def rotate_further(
        self,
        x: Float[Tensor, "batch num_heads len head_dim"],
        before: tuple[Float[Tensor, "*where pairs"], Float[Tensor, "*where pairs"]],
        after: tuple[Float[Tensor, "*where pairs"], Float[Tensor, "*where pairs"]],
    ) -> Float[Tensor, "batch num_heads len head_dim"]:
        """Return x, which was rotated by the angles `before`, as if it had been rotated by `after`
        instead.

        before, after: (cos, sin) of the angles, each (..., len, pairs), in float64, so that only
        the result is rounded. As complex numbers, (cos' + i sin') / (cos + i sin) is the rotation
        that is left to do; a factor that both have cancels.
        """
        cos, sin = before
        new_cos, new_sin = after
        squared_norm = cos.square() + sin.square()
        real = (new_cos * cos + new_sin * sin) / squared_norm
        imaginary = (new_sin * cos - new_cos * sin) / squared_norm
        return self.rotate_channels((x,), real, imaginary)[0]

    def rotate_channels(self, xs: Vectors, cos: CosOrSin, sin: CosOrSin) -> Vectors:
        """Return each x rotated by cos and sin, in the channels that this encoding rotates; the
        other channels are unchanged."""
        return rotate_together(xs, cos, sin, interleaved=self.interleaved)

    def _check_width(self, x: Tensor) -> None:
        """Raise ValueError unless x, which is q or k, is head_dim wide."""
        if x.shape[-1] != self.head_dim:
            raise ValueError(
                f"{type(self).__name__}: built for head_dim={self.head_dim}, "
                f"got q or k with shape {tuple(x.shape)}."
            )
