"""A small reference Transformer that takes any position encoding."""

from posenc.models.config import DecoderConfig
from posenc.models.decoder import Decoder

__all__ = ["Decoder", "DecoderConfig"]
