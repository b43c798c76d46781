"""What a position encoding is: four places where position enters attention, and claims."""

from posenc.encoding.base import Pass, PositionEncoding
from posenc.encoding.compose import Compose, Within
from posenc.encoding.distance_bias import DistanceBias
from posenc.encoding.per_layer import PerLayer
from posenc.encoding.shape import ModelShape

__all__ = [
    "Compose",
    "DistanceBias",
    "ModelShape",
    "Pass",
    "PerLayer",
    "PositionEncoding",
    "Within",
]
