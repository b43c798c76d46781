"""The base class of position encodings, its claims, and ways to combine encodings."""

from posenc.encodings.base.base import Pass as Pass
from posenc.encodings.base.base import PositionEncoding as PositionEncoding
from posenc.encodings.base.claims import Claims as Claims
from posenc.encodings.base.compose import Compose as Compose
from posenc.encodings.base.distance_bias import DistanceBias as DistanceBias
from posenc.encodings.base.mask_encoding import Within as Within
from posenc.encodings.base.per_layer import PerLayer as PerLayer
from posenc.encodings.base.shape import ModelShape as ModelShape
