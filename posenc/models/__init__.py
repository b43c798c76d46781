"""A small reference Transformer that takes any position encoding."""

from posenc.models.config import DecoderConfig
from posenc.models.decoder import Decoder
from posenc.models.encoder_decoder import Encoder, EncoderDecoder
from posenc.models.generating import generate

__all__ = ["Decoder", "DecoderConfig", "Encoder", "EncoderDecoder", "generate"]
