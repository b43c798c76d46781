"""Position encodings for Transformers: use, compare, extend, inspect."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ModelShape": "posenc.encoding",
    "PositionEncoding": "posenc.encoding",
    "Claims": "posenc.encoding",
    "Tokens": "posenc.terms.tokens",
    "Term": "posenc.terms.term",
    "DistanceBias": "posenc.encoding",
    "Pass": "posenc.encoding",
    "names": "posenc.registry",
    "create": "posenc.registry",
    "attention": "posenc.attend.attention",
    "explain": "posenc.attend.attention",
    "Attention": "posenc.attend.multihead",
    "KVCache": "posenc.attend.cache",
    "Decoder": "posenc.models.decoder",
    "DecoderConfig": "posenc.models.config",
    "Encoder": "posenc.models.encoder",
    "EncoderDecoder": "posenc.models.encoder_decoder",
    "generate": "posenc.models.generating",
    "PerLayer": "posenc.encoding.per_layer",
    "Mask": "posenc.masks",
    "Sinusoidal": "posenc.embeddings.sinusoidal",
    "Learned": "posenc.embeddings.learned",
    "Learned2D": "posenc.embeddings.learned_2d",
    "SinCos2D": "posenc.embeddings.sincos_2d",
    "BertEmbedding": "posenc.embeddings.bert",
    "RoPE": "posenc.queries_keys.rope",
    "MRoPE": "posenc.queries_keys.mrope",
    "mrope_positions": "posenc.queries_keys.mrope",
    "AxialRoPE": "posenc.queries_keys.axial",
    "MixedRoPE": "posenc.queries_keys.axial",
    "XPos": "posenc.queries_keys.xpos",
    "PoPE": "posenc.queries_keys.pope",
    "LogN": "posenc.queries_keys.query_temperature",
    "Llama4Temperature": "posenc.queries_keys.query_temperature",
    "ReRoPE": "posenc.queries_keys.position_maps",
    "SelfExtend": "posenc.queries_keys.position_maps",
    "DualChunk": "posenc.queries_keys.position_maps",
    "convert_layout": "posenc.queries_keys.layout",
    "linear_attention": "posenc.attend.linear",
    "ALiBi": "posenc.scores.alibi",
    "T5Bias": "posenc.scores.t5",
    "Kerple": "posenc.scores.kerple",
    "Sandwich": "posenc.scores.sandwich",
    "FIRE": "posenc.scores.fire",
    "FoX": "posenc.scores.forgetting",
    "DAPE": "posenc.scores.dape",
    "RelativeLogits": "posenc.scores.relative_logits",
    "Shaw": "posenc.values.shaw",
    "TransformerXL": "posenc.scores.transformer_xl",
    "DeBERTa": "posenc.scores.deberta",
    "CoPE": "posenc.scores.cope",
    "Compose": "posenc.encoding.compose",
    "Within": "posenc.encoding.within",
    "DecoupledRoPE": "posenc.queries_keys.decoupled",
    "RNoPE": "posenc.queries_keys.rnope",
}

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


_MODULES = ("masks", "positions", "registry")
"""Imported when first touched, so that `posenc.masks.causal` works after `import posenc`."""


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"posenc.{name}")
    raise AttributeError(f"module 'posenc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
