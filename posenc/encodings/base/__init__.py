"""The base class of position encodings, its claims, and ways to combine encodings."""

from posenc.encodings.base.base import Pass, PositionEncoding
from posenc.encodings.base.claims import Claims
from posenc.encodings.base.compose import Compose
from posenc.encodings.base.distance_bias import DistanceBias
from posenc.encodings.base.per_layer import PerLayer
from posenc.encodings.base.shape import ModelShape
from posenc.encodings.base.within import Within

__all__ = [
    "Claims",
    "Compose",
    "DistanceBias",
    "ModelShape",
    "Pass",
    "PerLayer",
    "PositionEncoding",
    "Within",
]
