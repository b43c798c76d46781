"""A GGUF file with other positions: rope_freqs.weight, attn_factor and metadata, in a new file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from posenc.dialects import formulas
from posenc.dialects.computed import Computed, Layer
from posenc.dialects.gguf_metadata import KEYS, Metadata
from posenc.dialects.gguf_reader import FACTORS, open_gguf, read_metadata
from posenc.dialects.runtimes.llama_cpp import LOADS_FREQS, from_metadata
from posenc.dialects.writers.dual import STANDSTILL
from posenc.dialects.writers.proof import disagreement
from posenc.report.atomic import atomically

SCALING_KEYS = (
    "scaling_type", "scaling_factor", "original_length", "beta_fast", "beta_slow",
    "yarn_attn_factor", "yarn_ext_factor", "log_multiplier", "attn_factor",
)  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """What to write. keys: field of Metadata -> value. drop: fields whose keys go.
    rope_freqs: what each plain frequency is divided by, None for no such tensor."""

    keys: Mapping[str, Any]
    drop: tuple[str, ...] = ()
    rope_freqs: tuple[float, ...] | None = None
    lines: tuple[str, ...] = field(default=())


def meant_by(meta: Metadata) -> Layer:
    """What a file's keys say, read with goodwill: the betas and yarn_attn_factor that the
    converter writes for every architecture, though libllama reads them for two."""
    if meta.scaling_type != "yarn":
        return next(iter(from_metadata(meta, None).layers.values()))
    factor = meta.scaling_factor
    inv_freq = formulas.yarn(
        meta.dimension_count, meta.freq_base, factor, meta.original_length,
        meta.beta_fast or 32.0, meta.beta_slow or 1.0,
    )  # fmt: skip
    usual = formulas.yarn_scale(factor)
    given = meta.yarn_attn_factor
    return Layer(inv_freq, (usual if given is None else given) * meta.attn_factor)


def plan(meta: Metadata, wanted: Layer, theta: float, largest: int) -> Edit:
    """How to make libllama compute `wanted` from a file of this architecture.

    Raises: ValueError where it cannot.
    """
    if len(wanted.inv_freq) != meta.dimension_count // 2:
        raise ValueError(
            f"{meta.architecture}: {len(wanted.inv_freq)} rotated pairs are wanted, the file has "
            f"{meta.dimension_count // 2}."
        )
    keys: dict[str, Any] = {"freq_base": theta, "context_length": largest}
    plain = formulas.plain(meta.dimension_count, theta)
    if _same(wanted.inv_freq, plain):
        return _edit(meta, {**keys, "attn_factor": wanted.multiplier}, None)
    if meta.scaling_type == "yarn":
        kept = formulas.yarn(meta.dimension_count, theta, meta.scaling_factor, meta.original_length)
        if _same(wanted.inv_freq, kept):
            usual = formulas.yarn_scale(meta.scaling_factor)
            yarn = {name: getattr(meta, name) for name in SCALING_KEYS[:3]}
            return _edit(meta, {**keys, **yarn, "attn_factor": wanted.multiplier / usual}, None)
    if meta.architecture not in LOADS_FREQS:
        raise ValueError(
            f"the architecture {meta.architecture} loads no rope_freqs.weight, so libllama cannot "
            "compute these frequencies."
        )
    ratios = tuple(p / f if f else STANDSTILL for p, f in zip(plain, wanted.inv_freq, strict=True))
    return _edit(meta, {**keys, "attn_factor": wanted.multiplier}, ratios)


def _same(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return all(abs(x - y) <= 1e-9 * abs(y) for x, y in zip(a, b, strict=True))


def _edit(meta: Metadata, keys: dict[str, Any], freqs: tuple[float, ...] | None) -> Edit:
    if keys["attn_factor"] == 1 and "attn_factor" not in meta.given:
        keys.pop("attn_factor")
    keys = {k: v for k, v in keys.items() if k not in meta.given or getattr(meta, k) != v}
    wanted = {"scaling_type", "scaling_factor", "original_length"} if freqs is None else set()
    stays = wanted if meta.scaling_type == "yarn" else set()
    drop = tuple(
        name for name in SCALING_KEYS
        if name in meta.given and name not in keys and name not in stays and name != "attn_factor"
    )  # fmt: skip
    lines = [f"+ {meta.architecture}.{KEYS[k]}: {v:g}" for k, v in keys.items()]
    lines += [f"- {meta.architecture}.{KEYS[k]}: {getattr(meta, k)}" for k in drop]
    if freqs is not None:
        lines.append(f"+ {FACTORS['rope_freqs']}: f32[{len(freqs)}]")
    return Edit(keys, drop, freqs, tuple(lines))


def edited(meta: Metadata, edit: Edit) -> Metadata:
    """The keys and tensors as they stand after an edit."""
    defaults = {f.name: f.default for f in fields(Metadata)}
    dropped = {name: defaults[name] for name in edit.drop}
    given = (meta.given - set(edit.drop)) | set(edit.keys)
    tensors = {} if edit.rope_freqs is None else {
        "rope_freqs": edit.rope_freqs, "factors_long": None, "factors_short": None,
    }  # fmt: skip
    return replace(meta, **dropped, **edit.keys, **tensors, given=frozenset(given))


def write(path: Path, out: Path, edit: Edit, wanted: Layer) -> None:
    """Write the edited copy and prove it by reading it back; nothing is left where that fails.

    Raises: ValueError where `out` exists or libllama would not compute what is wanted.
    """
    import numpy as np

    if out.exists():
        raise ValueError(f"{out} exists already; give a new file.")
    reader = open_gguf(path)
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

    named = reader.fields["general.architecture"].contents()
    freqs = None if edit.rope_freqs is None else np.asarray(edit.rope_freqs, np.float32)
    dropped = {f"{named}.{KEYS[name]}" for name in (*edit.drop, *edit.keys)}
    own = set(FACTORS.values()) if freqs is not None else set()
    with atomically(out) as partial:
        writer = GGUFWriter(str(partial), named, endianess=reader.endianess)
        for name, value in reader.fields.items():
            if name.startswith("GGUF.") or name == "general.architecture" or name in dropped:
                continue
            kind = value.types[0]
            inner = value.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(name, value.contents(), kind, sub_type=inner)
        for name, value in edit.keys.items():
            kind = GGUFValueType.UINT32 if name == "context_length" else GGUFValueType.FLOAT32
            kind = GGUFValueType.STRING if isinstance(value, str) else kind
            writer.add_key_value(f"{named}.{KEYS[name]}", value, kind)
        tensors = [t for t in reader.tensors if t.name.rpartition("blk.0.")[2] not in own]
        if freqs is not None:
            writer.add_tensor_info(
                FACTORS["rope_freqs"], freqs.shape, freqs.dtype, freqs.nbytes,
                GGMLQuantizationType.F32,
            )  # fmt: skip
        for tensor in tensors:
            data = tensor.data
            writer.add_tensor_info(
                tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if freqs is not None:
            writer.write_tensor_data(freqs)
        for tensor in tensors:
            writer.write_tensor_data(tensor.data)
        writer.close()
        reason = prove(partial, wanted)
        if reason:
            raise ValueError(f"not written, the proof failed: {reason}.")


def prove(path: Path, wanted: Layer) -> str:
    """Why libllama would compute something else from a file; empty where not."""
    got = from_metadata(read_metadata(path), None)
    kind = "full_attention" if "full_attention" in got.layers else "all"
    single = Computed("llama.cpp", "", None, {"all": got.layers[kind]}, 1.0)
    return disagreement(single, Computed("meant", "", None, {"all": wanted}, 1.0))
