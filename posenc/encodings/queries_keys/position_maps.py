"""Extend the context without training: RoPE at positions mapped into the training length.

Each method computes two or three ordinary attentions over disjoint sets of keys and merges them.
The cache stores keys unrotated. All methods need causal attention.
"""

from dataclasses import replace
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.position_encoding import ModelShape, Pass
from posenc.encodings.numerics.torch_modes import outside_inference_mode
from posenc.encodings.queries_keys.rope import RoPE
from posenc.frequencies.scalings.scaling import Scaling
from posenc.masks import Mask, sliding_window
from posenc.positions.tokens import (
    KeyPositionTensor,
    Positions,
    QueryPositionTensor,
    RememberedPositions,
    are_known_equal,
    subtract_first_key,
)


class PositionMap(RoPE):
    """Base class of encodings that apply RoPE at positions mapped into the training length.
    Attention is computed in several passes, each with its own map and for its own query-key pairs.
    A subclass defines `mapped_passes`.

    The authors also multiply the query at position p by ln(p + 1) / ln(train_length) beyond the
    training length: Compose(ReRoPE(...), LogN(train_length)).
    """

    claims = replace(RoPE.claims, needs_raw_k=True, causal_only=True)

    _prepared_passes: tuple[RememberedPositions, tuple[Pass, ...]] | None = None

    def mapped_passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        """Return the passes of attention, one for each set of query-key pairs: its mapped
        positions, and the mask that shows its pairs. A subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define mapped_passes()")

    def passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        if self._prepared_passes is not None:
            positions, passes = self._prepared_passes
            if positions.fits(q_positions) and positions.fits(kv_positions):
                return passes
        return self.mapped_passes(q_positions, kv_positions)

    def prepare(self, positions: Positions, length: int | None = None) -> Self:
        prepared = super().prepare(positions, length)
        if isinstance(positions, range):  # mapped later, on the device of the first queries
            return prepared
        with outside_inference_mode():
            positions = positions.clone()  # the caller may write to its own
            passes = self.passes(positions, positions)
        prepared._prepared_passes = (RememberedPositions(positions), passes)
        for one_pass in passes:
            for mapped_positions in (one_pass.q_positions, one_pass.kv_positions):
                # Positions that are not mapped have their tables already.
                if not are_known_equal(mapped_positions, positions):
                    prepared._remembered_cos_sin += (
                        prepared.cos_sin_to_remember(mapped_positions),
                    )
        return prepared

    @explain_misfits
    def forward(self, q: Any, k: Any, positions: Any, *, layout: str = "bhtd") -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} rotates q and k once for each of its passes: pass it to "
            "posenc.attention or posenc.Attention."
        )


class ReRoPE(PositionMap):
    """Apply RoPE with relative positions that stop growing, or grow slower, beyond a window.

    relative = D for D < window, else window (leak=None) or window + (D - window) / leak

    Args:
        head_dim, rope_theta, interleaved, rotary_dim, scaling: as in RoPE.
        window: distance in tokens up to which positions are exact.
        leak: Leaky ReRoPE's divisor of the distance beyond the window, at least 1; None: ReRoPE.

    Shapes: as RoPE; two passes. Units: tokens. Precision: as RoPE.
    Raises: ValueError if window < 1 or leak < 1.
    Source: Su 2023, kexue.fm/archives/9706 and 9708; github.com/bojone/rerope.

    >>> rerope = posenc.ReRoPE(head_dim=16, window=4, interleaved=False)
    >>> q = k = v = torch.randn(1, 4, 6, 16)
    >>> where = {"q_positions": torch.arange(6), "kv_positions": torch.arange(6)}
    >>> posenc.attention(q, k, v, rerope, mask=posenc.masks.causal, **where).shape
    torch.Size([1, 4, 6, 16])
    """

    claims = replace(PositionMap.claims, source="Su 2023, kexue.fm/archives/9706 and 9708")

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        window: int,
        leak: float | None = None,
        rotary_dim: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(
            head_dim, rope_theta, interleaved=interleaved, rotary_dim=rotary_dim, scaling=scaling
        )
        if window < 1 or (leak is not None and leak < 1):
            raise ValueError(
                f"ReRoPE: window and leak must be at least 1, got window={window}, leak={leak}."
            )
        self.window = window
        self.leak = leak

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> Self:
        """Build the encoding for a model, with a window of half the training length unless
        given."""
        return super().from_shape(shape, **{"window": max(1, shape.train_length // 2), **options})

    def mapped_passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        if self.leak is None:
            q_far = torch.full_like(q_positions, self.window)
            kv_far = torch.zeros_like(kv_positions)
        else:
            # Small numbers, because a quotient of far positions would lose digits.
            q_from_first_key, kv_from_first_key = subtract_first_key(q_positions, kv_positions)
            q_far = q_from_first_key / self.leak + (self.window - self.window / self.leak)
            kv_far = kv_from_first_key / self.leak
        return _near_and_far_passes(q_positions, kv_positions, self.window, q_far, kv_far)


class SelfExtend(PositionMap):
    """Apply RoPE with exact positions nearby and one position per group of tokens far away.

    relative = D for D < window, else floor(i/group_size) - floor(j/group_size)
    + window - window/group_size

    Extrapolates to (train_length - window) * group_size + window tokens.

    Args:
        head_dim, rope_theta, interleaved, rotary_dim, scaling: as in RoPE.
        group_size: number of tokens with one position.
        window: distance in tokens up to which positions are exact.

    Shapes: as RoPE; two passes. Units: tokens. Precision: as RoPE.
    Raises: ValueError if group_size or window < 1.
    Source: Jin et al. 2024, arXiv:2401.01325, section 3; the shift window - window/group_size is
    not rounded, as in the released code.

    >>> encoding = posenc.create("self_extend", posenc.ModelShape(64, 4, train_length=32))
    >>> layer = posenc.Attention(64, 4, encoding=encoding)
    >>> layer(torch.randn(1, 9, 64), torch.arange(9), mask=posenc.masks.causal).shape
    torch.Size([1, 9, 64])
    """

    claims = replace(PositionMap.claims, source="Jin et al. 2024, arXiv:2401.01325, section 3")

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        window: int,
        group_size: int = 8,
        rotary_dim: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(
            head_dim, rope_theta, interleaved=interleaved, rotary_dim=rotary_dim, scaling=scaling
        )
        self.claims = replace(self.claims, shift_invariant=False)
        if window < 1 or group_size < 1:
            raise ValueError(
                "SelfExtend: window and group_size must be at least 1, "
                f"got window={window}, group_size={group_size}."
            )
        self.window = window
        self.group_size = group_size

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> Self:
        """Build the encoding for a model, with a window of a quarter of the training length unless
        given."""
        return super().from_shape(shape, **{"window": max(1, shape.train_length // 4), **options})

    def mapped_passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        q_group = torch.div(q_positions, self.group_size, rounding_mode="floor")
        kv_group = torch.div(kv_positions, self.group_size, rounding_mode="floor")
        shift = self.window - self.window / self.group_size
        if shift.is_integer():
            q_group = q_group + int(shift)
        else:
            q_group, kv_group = subtract_first_key(q_group, kv_group)
            q_group = q_group + shift
        return _near_and_far_passes(q_positions, kv_positions, self.window, q_group, kv_group)


def _near_and_far_passes(
    q_positions: Tensor, kv_positions: Tensor, window: int, q_far: Tensor, kv_far: Tensor
) -> tuple[Pass, Pass]:
    """Return two passes: one for pairs closer than `window`, at their own positions, and one for
    all other pairs, at the mapped positions q_far and kv_far."""
    far_mask = Mask(lambda pairs: pairs.q_position - pairs.kv_position >= window)
    return (Pass(q_positions, kv_positions, sliding_window(window)), Pass(q_far, kv_far, far_mask))


class DualChunk(PositionMap):
    """Apply RoPE with exact positions within a chunk and bounded ones to earlier chunks.

    With s = chunk_size - local_window as the length of a chunk, a key j is rotated to position
    j mod s. A query i is rotated to i mod s for keys of its own chunk, to min(i mod s + s,
    chunk_size) for those of the chunk before, and to min(2s - 1, chunk_size) for all earlier ones.

    Args:
        head_dim, rope_theta, interleaved, rotary_dim, scaling: as in RoPE.
        chunk_size: the largest relative position, below the training length.
        local_window: distance in tokens that stays exact across the border of two chunks.

    Shapes: as RoPE; three passes. Units: tokens. Precision: as RoPE.
    Raises: ValueError unless 0 <= local_window < chunk_size.
    Source: An et al. 2024, arXiv:2402.17463, section 3; github.com/HKUNLP/ChunkLlama.

    >>> encoding = posenc.create("dual_chunk", posenc.ModelShape(64, 4, train_length=32))
    >>> layer = posenc.Attention(64, 4, encoding=encoding)
    >>> layer(torch.randn(1, 9, 64), torch.arange(9), mask=posenc.masks.causal).shape
    torch.Size([1, 9, 64])
    """

    claims = replace(PositionMap.claims, source="An et al. 2024, arXiv:2402.17463, section 3")

    def __init__(
        self,
        head_dim: int,
        rope_theta: float = 10000.0,
        *,
        interleaved: bool,
        chunk_size: int,
        local_window: int,
        rotary_dim: int | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(
            head_dim, rope_theta, interleaved=interleaved, rotary_dim=rotary_dim, scaling=scaling
        )
        self.claims = replace(self.claims, shift_invariant=False)
        if not 0 <= local_window < chunk_size:
            raise ValueError(
                "DualChunk: local_window must be at least 0 and below chunk_size, "
                f"got local_window={local_window}, chunk_size={chunk_size}."
            )
        self.chunk_size = chunk_size
        self.local_window = local_window

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options: Any) -> Self:
        """Build the encoding for a model. As in the authors' code, chunk_size defaults to 3/4 and
        local_window to 1/16 of the training length."""
        default_sizes = {
            "chunk_size": max(1, shape.train_length * 3 // 4),
            "local_window": shape.train_length // 16,
        }
        return super().from_shape(shape, **{**default_sizes, **options})

    def mapped_passes(
        self, q_positions: QueryPositionTensor, kv_positions: KeyPositionTensor
    ) -> tuple[Pass, ...]:
        stride = self.chunk_size - self.local_window
        kv_position_in_chunk = kv_positions % stride
        q_position_in_chunk = q_positions % stride
        q_to_one_before = (q_position_in_chunk + stride).clamp(max=self.chunk_size)
        q_to_earlier = torch.full_like(q_position_in_chunk, min(2 * stride - 1, self.chunk_size))

        def chunks_apart(low: int, high: float) -> Mask:
            """Return a mask that shows keys whose chunk is `low` to `high` chunks before the
            query's."""

            def visible(pairs):
                num_chunks_apart = pairs.q_position // stride - pairs.kv_position // stride
                return (num_chunks_apart >= low) & (num_chunks_apart <= high)

            return Mask(visible)

        return (
            Pass(q_position_in_chunk, kv_position_in_chunk, chunks_apart(0, 0)),
            Pass(q_to_one_before, kv_position_in_chunk, chunks_apart(1, 1)),
            Pass(q_to_earlier, kv_position_in_chunk, chunks_apart(2, float("inf"))),
        )
