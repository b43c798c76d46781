"""One line per encoding; from that line alone it is in the tests, the tool, the plots and the
tables."""

from __future__ import annotations

import difflib
import importlib
from typing import Any, NamedTuple

from posenc.encoding import ModelShape, PositionEncoding


class Entry(NamedTuple):
    path: str
    """module:Class"""
    checked: str
    """What the tests hold it to: "golden" (the authors' own numbers) or "reference" (the paper
    in float64)."""
    defaults: dict[str, Any] = {}  # noqa: RUF012 - read only


_ENTRIES: dict[str, Entry] = {
    "nope": Entry("posenc.encoding:PositionEncoding", "reference"),
    "sinusoidal": Entry("posenc.embeddings.sinusoidal:Sinusoidal", "golden"),
    "learned": Entry("posenc.embeddings.learned:Learned", "golden"),
    "rope": Entry("posenc.queries_keys.rope:RoPE", "golden", {"interleaved": False}),
    "rope_interleaved": Entry("posenc.queries_keys.rope:RoPE", "golden", {"interleaved": True}),
    "partial_rope": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "partial_rotary_factor": 0.5},
    ),
    "p_rope": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "proportional", "p": 0.75},
    ),
    "linear": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "linear", "factor": 4.0},
    ),
    "ntk": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "ntk", "factor": 4.0},
    ),
    "ntk_by_parts": Entry(
        "posenc.queries_keys.rope:RoPE",
        "reference",
        {"interleaved": False, "scaling": "ntk_by_parts", "factor": 4.0},
    ),
    "dynamic_ntk": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "dynamic_ntk", "factor": 4.0},
    ),
    "yarn": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "yarn", "factor": 4.0},
    ),
    "llama3": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "llama3", "factor": 4.0},
    ),
    "longrope": Entry(
        "posenc.queries_keys.rope:RoPE",
        "golden",
        {"interleaved": False, "scaling": "longrope", "factor": 4.0},
    ),
    "alibi": Entry("posenc.scores.alibi:ALiBi", "golden"),
    "t5": Entry("posenc.scores.t5:T5Bias", "golden"),
    "shaw": Entry("posenc.values.shaw:Shaw", "golden"),
    "transformer_xl": Entry("posenc.scores.transformer_xl:TransformerXL", "golden"),
    "deberta": Entry("posenc.scores.deberta:DeBERTa", "golden"),
    "cope": Entry("posenc.scores.cope:CoPE", "golden"),
}


def names() -> tuple[str, ...]:
    """The registered encodings."""
    return tuple(_ENTRIES)


def entry(name: str) -> Entry:
    """The registry line of `name`. Raises ValueError, with the nearest name, where there is
    none."""
    if name not in _ENTRIES:
        near = difflib.get_close_matches(name, _ENTRIES, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"Unknown encoding {name!r}.{hint} Known: {', '.join(_ENTRIES)}.")
    return _ENTRIES[name]


def encoding_class(name: str) -> type[PositionEncoding]:
    """The class behind `name`."""
    module, _, attribute = entry(name).path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def create(name: str, shape: ModelShape, **options: Any) -> PositionEncoding:
    """Build the encoding `name` for a model of this shape; options override the registry's
    defaults."""
    return encoding_class(name).from_shape(shape, **{**entry(name).defaults, **options})
