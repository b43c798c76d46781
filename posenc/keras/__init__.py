"""Position encodings as Keras 3 layers, with the same results as the PyTorch modules; needs `keras`
and one of its backends.

>>> import keras
>>> layer = posenc.keras.RotaryEmbedding(interleaved=False)
>>> layer(keras.ops.ones((2, 10, 64))).shape == (2, 10, 64)
True
"""

from posenc.keras.attention import PositionAwareAttention, ShawAttention
from posenc.keras.biases import ALiBi, KerpleBias, T5RelativeBias
from posenc.keras.embeddings import (
    BertEmbedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEncoding,
)
from posenc.keras.rotary import RotaryEmbedding

__all__ = [
    "ALiBi",
    "BertEmbedding",
    "KerpleBias",
    "LearnedPositionEmbedding",
    "PositionAwareAttention",
    "RotaryEmbedding",
    "ShawAttention",
    "SinusoidalPositionEncoding",
    "T5RelativeBias",
]


def __dir__() -> list[str]:
    return __all__
