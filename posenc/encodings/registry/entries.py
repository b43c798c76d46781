"""Register posenc's encodings, one line each, for tests, commands, plots and tables."""

from typing import Any, NamedTuple

from posenc.frequencies.scalings.lookup import SCALINGS


class Entry(NamedTuple):
    """Describe an encoding that has a name."""

    class_path: str
    """The class, as "module:Class"."""
    evidence: str
    """What its tests compare it with: "golden" (numbers printed by the authors' code) or
    "reference" (the paper's formula in float64); "unchecked" for encodings of other packages."""
    defaults: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Default options: arguments of the class, or of its from_shape, which a text that names the
    encoding can override."""
    origin: str = ""
    """The package that defines it; "" for posenc."""


_QUERIES_KEYS_PACKAGE = "posenc.encodings.queries_keys"
_ROPE_CLASS_PATH = f"{_QUERIES_KEYS_PACKAGE}.rope:RoPE"
_POSITION_MAPS_MODULE = f"{_QUERIES_KEYS_PACKAGE}.position_maps"


def _entries_of_scalings() -> dict[str, Entry]:
    """Return the registry's entries, by name, of RoPE with each scaling that is a named
    encoding."""
    entries = {}
    for scaling in SCALINGS.values():
        encoding = scaling.encoding
        if encoding is not None:
            options = {"interleaved": False, "scaling": scaling.name, **encoding.options}
            entries[encoding.name] = Entry(_ROPE_CLASS_PATH, encoding.evidence, options)
    return entries


_ENTRIES: dict[str, Entry] = {
    "nope": Entry("posenc.encodings.base.position_encoding:PositionEncoding", "reference"),
    "sinusoidal": Entry("posenc.encodings.embeddings.sinusoidal:Sinusoidal", "golden"),
    "sinusoidal_concatenated": Entry(
        "posenc.encodings.embeddings.sinusoidal:Sinusoidal", "golden", {"order": "concatenated"}
    ),
    "sinusoidal_fairseq": Entry(
        "posenc.encodings.embeddings.sinusoidal:Sinusoidal", "golden", {"order": "fairseq"}
    ),
    "learned": Entry("posenc.encodings.embeddings.learned:Learned", "golden"),
    "sincos_2d": Entry("posenc.encodings.embeddings.sincos_2d:SinCos2D", "golden"),
    "learned_2d": Entry("posenc.encodings.embeddings.learned_2d:Learned2D", "golden"),
    "rope": Entry(_ROPE_CLASS_PATH, "golden", {"interleaved": False}),
    "rope_interleaved": Entry(_ROPE_CLASS_PATH, "golden", {"interleaved": True}),
    "partial_rope": Entry(
        _ROPE_CLASS_PATH, "golden", {"interleaved": False, "partial_rotary_factor": 0.5}
    ),
    **_entries_of_scalings(),
    "rerope": Entry(f"{_POSITION_MAPS_MODULE}:ReRoPE", "golden", {"interleaved": False}),
    "leaky_rerope": Entry(
        f"{_POSITION_MAPS_MODULE}:ReRoPE", "golden", {"interleaved": False, "leak": 8.0}
    ),
    "self_extend": Entry(f"{_POSITION_MAPS_MODULE}:SelfExtend", "golden", {"interleaved": False}),
    "dual_chunk": Entry(f"{_POSITION_MAPS_MODULE}:DualChunk", "golden", {"interleaved": False}),
    "xpos": Entry(f"{_QUERIES_KEYS_PACKAGE}.xpos:XPos", "golden", {"interleaved": False}),
    "mrope": Entry(f"{_QUERIES_KEYS_PACKAGE}.mrope:MRoPE", "golden", {"interleaved": False}),
    "mrope_interleaved": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.mrope:MRoPE",
        "golden",
        {"interleaved": False, "alternating": True},
    ),
    "axial_rope": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.axial:AxialRoPE", "golden", {"interleaved": False}
    ),
    "mixed_rope": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.axial:MixedRoPE", "golden", {"interleaved": False}
    ),
    "fope": Entry(f"{_QUERIES_KEYS_PACKAGE}.fope:FoPE", "reference"),
    "pope": Entry(f"{_QUERIES_KEYS_PACKAGE}.pope:PoPE", "golden"),
    "repo": Entry(f"{_QUERIES_KEYS_PACKAGE}.repo:RePo", "reference"),
    "rove": Entry("posenc.encodings.values.rove:RoVE", "golden", {"interleaved": False}),
    "logn": Entry(f"{_QUERIES_KEYS_PACKAGE}.query_temperature:LogN", "reference"),
    "llama4_temperature": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.query_temperature:Llama4Temperature", "reference"
    ),
    "alibi": Entry("posenc.encodings.scores.alibi:ALiBi", "golden"),
    "t5": Entry("posenc.encodings.scores.t5:T5Bias", "golden"),
    "kerple": Entry("posenc.encodings.scores.kerple:Kerple", "golden"),
    "kerple_power": Entry("posenc.encodings.scores.kerple:Kerple", "golden", {"form": "power"}),
    "sandwich": Entry("posenc.encodings.scores.sandwich:Sandwich", "reference"),
    "fire": Entry("posenc.encodings.scores.fire:FIRE", "golden"),
    "fox": Entry("posenc.encodings.scores.fox:FoX", "golden"),
    "dape": Entry("posenc.encodings.scores.dape:DAPE", "golden", {"inner": "kerple"}),
    "inkling": Entry("posenc.encodings.scores.inkling:RelativeLogits", "reference"),
    "relative_bias_2d": Entry("posenc.encodings.scores.relative_bias_2d:RelativeBias2D", "golden"),
    "swin_v2": Entry("posenc.encodings.scores.swin_v2:SwinV2Bias", "golden"),
    "shaw": Entry("posenc.encodings.values.shaw:Shaw", "golden"),
    "transformer_xl": Entry("posenc.encodings.scores.transformer_xl:TransformerXL", "golden"),
    "deberta": Entry("posenc.encodings.scores.deberta:DeBERTa", "golden"),
    "cope": Entry("posenc.encodings.scores.cope:CoPE", "golden"),
    "decoupled_rope": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.decoupled:DecoupledRoPE", "reference", {"interleaved": True}
    ),
    "rnope": Entry(f"{_QUERIES_KEYS_PACKAGE}.rnope:RNoPE", "reference", {"interleaved": False}),
    "rnope_swa": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.rnope:RNoPE",
        "reference",
        {"interleaved": False, "windows": "sliding"},
    ),
    "irope": Entry(
        f"{_QUERIES_KEYS_PACKAGE}.rnope:RNoPE",
        "reference",
        {"interleaved": True, "windows": "chunked"},
    ),
}
