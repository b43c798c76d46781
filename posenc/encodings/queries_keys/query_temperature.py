"""Query temperatures: sharper attention for queries that see more keys."""

import math
from dataclasses import replace

import torch
from jaxtyping import Float, Real
from torch import Tensor

from posenc.arguments import explain_misfits
from posenc.encodings.base.position_encoding import Cached, CachedPositions, ModelShape, QueriesKeys
from posenc.encodings.base.term import Tokens
from posenc.encodings.numerics.precision import at_least_float32
from posenc.encodings.queries_keys.rotation import QueryKeyEncoding

AnyPositions = Real[Tensor, "*where"]
Factors = Float[Tensor, "*where"]
"""Type of a factor for each position."""


class QueryTemperature(QueryKeyEncoding):
    """Base class of encodings that multiply each query by a factor that depends on its position.

    A subclass defines `factor`. A factor above 1 sharpens the query's attention, as a softmax
    temperature below 1 does.
    """

    claims = replace(
        QueryKeyEncoding.claims, shift_invariant=False, causal_only=True, own_scale=True
    )

    def factor(self, positions: AnyPositions, dtype: torch.dtype = torch.float32) -> Factors:
        """Return the factor of the query at each position. A subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} must define factor(positions)")

    def transform(self, q: Tokens, k: Tokens) -> QueriesKeys:
        assert q.x is not None and k.x is not None
        factor = self.factor(q.positions, at_least_float32(q.x.dtype))
        return (q.x * factor[..., None, :, None]).to(q.x.dtype), k.x

    def move_keys(self, k: Cached, before: CachedPositions, after: CachedPositions) -> Cached:
        return k  # only queries change


class LogN(QueryTemperature):
    """Multiply queries beyond the training length by ln(p + 1) / ln(train_length).

    q[p] *= max(1, ln(p + 1) / ln(train_length))

    Keeps the entropy of attention constant as the number of visible keys grows. It does not encode
    order: combine it with another encoding.

    Args:
        train_length: length in tokens up to which nothing changes, at least 2.

    Shapes: q (batch, num_heads, q_len, head_dim) -> the same; k is untouched.
    Units: positions in tokens from 0. Precision: float64 logarithms, applied in float32.
    Raises: ValueError if train_length < 2.
    Source: Su 2021, kexue.fm/archives/8823; Chiang and Cholak 2022, arXiv:2202.12172.

    >>> posenc.LogN(train_length=512).factor(torch.tensor([0, 511, 4095]))
    tensor([1.0000, 1.0000, 1.3333])
    """

    claims = replace(
        QueryTemperature.claims,
        source="Su 2021, kexue.fm/archives/8823; Chiang and Cholak 2022, arXiv:2202.12172",
    )

    def __init__(self, train_length: int) -> None:
        super().__init__()
        if train_length < 2:
            raise ValueError(f"LogN: train_length must be at least 2, got {train_length}.")
        self.train_length = train_length

    def factor(self, positions: AnyPositions, dtype: torch.dtype = torch.float32) -> Factors:
        num_seen_keys = positions.double().clamp(min=0) + 1  # negative positions get factor 1
        return (num_seen_keys.log() / math.log(self.train_length)).clamp(min=1).to(dtype)


class Llama4Temperature(QueryTemperature):
    """Multiply queries by a factor that grows with the logarithm of the position.

    q[p] *= 1 + attn_scale * ln(1 + floor((p + offset) / floor_scale))

    Args:
        floor_scale: length in tokens up to which nothing changes.
        attn_scale: factor of the logarithm.
        offset: 1 in Llama 4 (in layers without RoPE), 0 in Ministral 3 and Mistral 4 (with RoPE).

    Shapes: q (batch, num_heads, q_len, head_dim) -> the same; k is untouched.
    Units: positions in tokens from 0. Precision: float64 logarithms, applied in float32.
    Raises: ValueError if floor_scale < 1.
    Source: Meta 2025, github.com/meta-llama/llama-models, llama4; Nakanishi 2025, arXiv:2501.19399.

    >>> posenc.Llama4Temperature().factor(torch.tensor([0, 8191, 65535]))
    tensor([1.0000, 1.0693, 1.2197])
    """

    claims = replace(
        QueryTemperature.claims, source="Meta 2025, github.com/meta-llama/llama-models, llama4"
    )

    def __init__(
        self, floor_scale: int = 8192, attn_scale: float = 0.1, *, offset: int = 1
    ) -> None:
        super().__init__()
        self.floor_scale = floor_scale
        self.attn_scale = attn_scale
        self.offset = offset

    @classmethod
    @explain_misfits
    def from_shape(cls, shape: ModelShape, **options) -> "Llama4Temperature":
        """Build the encoding for a model; floor_scale defaults to train_length."""
        return super().from_shape(shape, **{"floor_scale": shape.train_length, **options})

    def factor(self, positions: AnyPositions, dtype: torch.dtype = torch.float32) -> Factors:
        num_spans = ((positions.double() + self.offset) / self.floor_scale).floor().clamp(min=0)
        return (1 + self.attn_scale * num_spans.log1p()).to(dtype)
