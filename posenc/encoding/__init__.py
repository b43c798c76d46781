"""What a position encoding is: four places where position enters attention, and claims."""

from posenc.encoding.base import Pass, PositionEncoding
from posenc.encoding.claims import Claims
from posenc.encoding.compose import Compose
from posenc.encoding.distance_bias import DistanceBias
from posenc.encoding.per_layer import PerLayer
from posenc.encoding.shape import ModelShape
from posenc.encoding.within import Within

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
