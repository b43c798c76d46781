"""Position encodings for Transformers: use, compare, extend, inspect."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:  # for type checkers and editors; a test holds it to what __getattr__ loads
    from posenc import compare as compare
    from posenc import extend as extend
    from posenc import hf as hf
    from posenc import inspect as inspect
    from posenc import keras as keras
    from posenc import masks as masks
    from posenc import nn as nn
    from posenc import positions as positions
    from posenc import registry as registry
    from posenc import testing as testing
    from posenc.attend.attention import attention as attention
    from posenc.attend.attention import explain as explain
    from posenc.attend.cache import KVCache as KVCache
    from posenc.attend.linear import linear_attention as linear_attention
    from posenc.attend.multihead import Attention as Attention
    from posenc.embeddings.bert import BertEmbedding as BertEmbedding
    from posenc.embeddings.learned import Learned as Learned
    from posenc.embeddings.learned_2d import Learned2D as Learned2D
    from posenc.embeddings.sincos_2d import SinCos2D as SinCos2D
    from posenc.embeddings.sinusoidal import Sinusoidal as Sinusoidal
    from posenc.encoding import Claims as Claims
    from posenc.encoding import DistanceBias as DistanceBias
    from posenc.encoding import ModelShape as ModelShape
    from posenc.encoding import Pass as Pass
    from posenc.encoding import PositionEncoding as PositionEncoding
    from posenc.encoding.compose import Compose as Compose
    from posenc.encoding.per_layer import PerLayer as PerLayer
    from posenc.encoding.within import Within as Within
    from posenc.masks import Mask as Mask
    from posenc.models.config import DecoderConfig as DecoderConfig
    from posenc.models.decoder import Decoder as Decoder
    from posenc.models.encoder import Encoder as Encoder
    from posenc.models.encoder_decoder import EncoderDecoder as EncoderDecoder
    from posenc.models.generating import generate as generate
    from posenc.queries_keys.axial import AxialRoPE as AxialRoPE
    from posenc.queries_keys.axial import MixedRoPE as MixedRoPE
    from posenc.queries_keys.decoupled import DecoupledRoPE as DecoupledRoPE
    from posenc.queries_keys.fope import FoPE as FoPE
    from posenc.queries_keys.layout import convert_layout as convert_layout
    from posenc.queries_keys.mrope import MRoPE as MRoPE
    from posenc.queries_keys.mrope import mrope_positions as mrope_positions
    from posenc.queries_keys.pope import PoPE as PoPE
    from posenc.queries_keys.position_maps import DualChunk as DualChunk
    from posenc.queries_keys.position_maps import ReRoPE as ReRoPE
    from posenc.queries_keys.position_maps import SelfExtend as SelfExtend
    from posenc.queries_keys.query_temperature import Llama4Temperature as Llama4Temperature
    from posenc.queries_keys.query_temperature import LogN as LogN
    from posenc.queries_keys.rnope import RNoPE as RNoPE
    from posenc.queries_keys.rope import RoPE as RoPE
    from posenc.queries_keys.xpos import XPos as XPos
    from posenc.registry import create as create
    from posenc.registry import names as names
    from posenc.registry import register as register
    from posenc.scores.alibi import ALiBi as ALiBi
    from posenc.scores.cope import CoPE as CoPE
    from posenc.scores.dape import DAPE as DAPE
    from posenc.scores.deberta import DeBERTa as DeBERTa
    from posenc.scores.fire import FIRE as FIRE
    from posenc.scores.forgetting import FoX as FoX
    from posenc.scores.kerple import Kerple as Kerple
    from posenc.scores.relative_logits import RelativeLogits as RelativeLogits
    from posenc.scores.sandwich import Sandwich as Sandwich
    from posenc.scores.t5 import T5Bias as T5Bias
    from posenc.scores.transformer_xl import TransformerXL as TransformerXL
    from posenc.terms.term import Term as Term
    from posenc.terms.tokens import Tokens as Tokens
    from posenc.values.shaw import Shaw as Shaw

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
    "register": "posenc.registry",
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
    "FoPE": "posenc.queries_keys.fope",
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

_MODULES = (
    "compare", "extend", "hf", "inspect", "keras", "masks", "nn", "positions", "registry",
    "testing",
)  # fmt: skip
"""Imported when first touched, so that `posenc.masks.causal` works after `import posenc`."""

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]

if not TYPE_CHECKING:  # a type checker knows every name from above

    def __getattr__(name: str) -> Any:
        if name in _PUBLIC:
            return getattr(importlib.import_module(_PUBLIC[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"posenc.{name}")
        hint = "" if name.startswith("_") else _hint(name)
        raise AttributeError(f"module 'posenc' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _hint(name: str) -> str:
    """The public name most like it, or where else it is defined."""
    import difflib
    import re
    from pathlib import Path

    public = {known.lower(): known for known in (*_MODULES, *__all__)}
    near = [known for known in public if known.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), public, n=1)
    if name.lower() not in public:
        folder, pattern = Path(__file__).parent, rf"^class ({re.escape(name)})\b"
        defined = [
            (".".join(path.relative_to(folder).with_suffix("").parts), found[1])
            for path in folder.rglob("*.py")
            for text in (path.read_text(encoding="utf-8"),)
            if (found := re.search(pattern, text, re.MULTILINE | re.IGNORECASE))
        ]
        if len(defined) == 1:
            module, exact = defined[0]
            return f". Did you mean: from posenc.{module} import {exact}"
    return f". Did you mean posenc.{public[near[0]]}?" if near else ""
