"""The base classes of encodings and of what they add to scores, and ways to combine encodings."""

from posenc.encodings.base.claims import Claims as Claims
from posenc.encodings.base.compose import Compose as Compose
from posenc.encodings.base.compose import Within as Within
from posenc.encodings.base.distance_bias import DistanceBias as DistanceBias
from posenc.encodings.base.per_layer import PerLayer as PerLayer
from posenc.encodings.base.position_encoding import ModelShape as ModelShape
from posenc.encodings.base.position_encoding import Pass as Pass
from posenc.encodings.base.position_encoding import PositionEncoding as PositionEncoding
