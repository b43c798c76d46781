"""Write a GGUF file with other positions: rope_freqs.weight, attn_factor and metadata."""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO

from posenc.files.atomic import atomically
from posenc.files.opening import open_ordinary, open_to_change
from posenc.frequencies import float64_formulas
from posenc.runtimes.computed_positions import (
    STOPPING_DIVISOR,
    ComputedPositions,
    LayerRotation,
    RefusedError,
)
from posenc.runtimes.disagreement import disagreement
from posenc.runtimes.files.gguf_header import (
    F32,
    FLOAT32,
    STRING,
    UINT32,
    Header,
    read_header,
    round_up,
)
from posenc.runtimes.files.gguf_metadata import FACTORS, KEYS, OLD_KEYS, Metadata, read_metadata
from posenc.runtimes.known.llama_cpp import compute_from_metadata

SCALING_KEYS = tuple(
    "scaling_type scaling_factor original_length beta_fast beta_slow yarn_attn_factor "
    "yarn_ext_factor log_multiplier attn_factor".split()
)

PIECE = 1 << 24
"""Bytes that are copied at once."""
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Edit:
    """The changes from a GGUF file to its copy.

    keys: field of Metadata -> new value. drop: fields whose keys are removed. rope_freqs: divisor
    of each unscaled frequency, None to leave the file's tensors. lines: the changes in words.
    """

    keys: Mapping[str, Any]
    drop: tuple[str, ...] = ()
    rope_freqs: tuple[float, ...] | None = None
    lines: tuple[str, ...] = field(default=())


def meaning_of_metadata(meta: Metadata) -> ComputedPositions:
    """Return what the author of a file means by its keys, whether or not libllama reads them: the
    converter writes betas and yarn_attn_factor for every architecture, libllama reads them for two.

    Raises: ValueError where libllama refuses the file, or longrope has lost its divisors: what is
        left is not what was meant.
    """
    if meta.lost_factors:
        lost_in_words = " and ".join(FACTORS[name] for name in meta.lost_factors)
        raise ValueError(
            f"{meta.architecture}.{KEYS['scaling_type']} is longrope and the file has lost "
            f"{lost_in_words}: nothing in it says what was meant. Convert the model again, or "
            "give its own config by --like CONFIG."
        )
    try:
        computed = compute_from_metadata(meta, None)
    except RefusedError as refused:
        raise ValueError(f"{refused}; --like CONFIG says what is meant.") from refused
    layers = dict(computed.layers)
    if meta.scaling_type != "yarn" or not layers:
        return computed
    factor = meta.scaling_factor
    inv_freq = float64_formulas.yarn_frequencies(
        meta.dimension_count,
        meta.freq_base,
        factor,
        meta.original_length,
        meta.beta_fast or 32.0,
        meta.beta_slow or 1.0,
    )
    usual_factor = float64_formulas.yarn_attention_factor(factor)
    stated_factor = meta.yarn_attn_factor
    full = LayerRotation(
        inv_freq, (usual_factor if stated_factor is None else stated_factor) * meta.attn_factor
    )
    return replace(computed, layers={**layers, FULL if FULL in layers else "all": full})


def plan_edit(
    meta: Metadata, wanted: ComputedPositions, bases: Mapping[str, float], largest: int
) -> Edit:
    """Return the edit after which libllama computes `wanted` from the file.

    bases: the base of each kind of layer. largest: the new context_length.

    Raises: ValueError where no keys and tensors of the architecture give it.
    """
    layers = wanted.layers
    full = layers.get(FULL, layers.get("all"))
    if full is None:
        kinds_in_words = (
            f"layers of the kinds {', '.join(layers)}" if layers else "no layer that rotates"
        )
        raise ValueError(f"it has {kinds_in_words}, which GGUF has no keys for")
    if len(full.inv_freq) != meta.dimension_count // 2:
        raise ValueError(
            f"{meta.architecture}: {len(full.inv_freq)} rotated pairs are wanted, the file has "
            f"{meta.dimension_count // 2}."
        )
    theta = bases[FULL if FULL in layers else "all"]
    keys: dict[str, Any] = {"freq_base": theta, "context_length": largest}
    if SLIDING in layers:
        keys["freq_base_swa"] = bases[SLIDING]
    if kept := _edit_that_keeps_scaling(meta, keys, wanted):
        return kept
    reasons = []
    for scaling, freqs in _scaling_candidates(meta, full, theta):
        edit = _edit_of_keys(meta, {**keys, **scaling}, freqs)
        try:
            why = _disagreement(metadata_after_edit(meta, edit), wanted)
        except RefusedError as refused:
            why = str(refused)
        if not why:
            return edit
        reasons.append(why)
    raise ValueError(f"{reasons[0]}; no other keys or tensors of {meta.architecture} say it.")


def _edit_that_keeps_scaling(
    meta: Metadata, keys: Mapping[str, Any], wanted: ComputedPositions
) -> Edit | None:
    """Return the edit that leaves the file's scaling unchanged; None where libllama would then
    compute something else than wanted, or change it with the context in another way.

    So a file that is right keeps both its lists of divisors: every other candidate has one list.
    """
    keys_present = {name: getattr(meta, name) for name in SCALING_KEYS if name in meta.given}
    edit = _edit_of_keys(meta, {**keys, "attn_factor": meta.attn_factor, **keys_present}, None)
    try:
        switches_alike = compute_from_metadata(meta, None).switch == wanted.switch
        return (
            edit
            if switches_alike and not _disagreement(metadata_after_edit(meta, edit), wanted)
            else None
        )
    except RefusedError:
        return None


def _scaling_candidates(
    meta: Metadata, full: LayerRotation, theta: float
) -> Iterator[tuple[dict[str, Any], tuple[float, ...] | None]]:
    """Yield (keys of the scaling, rope_freqs.weight) that give the rotation of the full-attention
    layers, the simplest first; None for no such tensor."""
    dim, multiplier = meta.dimension_count, full.multiplier
    plain = float64_formulas.unscaled_frequencies(dim, theta)
    if _nearly_equal(full.inv_freq, plain):
        yield {"attn_factor": multiplier}, None
    ratios = tuple(
        unscaled / frequency if frequency else STOPPING_DIVISOR
        for unscaled, frequency in zip(plain, full.inv_freq, strict=True)
    )
    if meta.scaling_type == "yarn":
        kept = float64_formulas.yarn_frequencies(
            dim, theta, meta.scaling_factor, meta.original_length
        )
        if _nearly_equal(full.inv_freq, kept):
            usual_multiplier = float64_formulas.yarn_attention_factor(meta.scaling_factor)
            yarn = {name: getattr(meta, name) for name in SCALING_KEYS[:3]}
            yield {**yarn, "attn_factor": multiplier / usual_multiplier}, None
    if all(math.isclose(r, ratios[0], rel_tol=1e-9) for r in ratios):
        linear = {"scaling_type": "linear", "scaling_factor": ratios[0]}
        yield {**linear, "attn_factor": multiplier}, None
    yield {"attn_factor": multiplier}, ratios


def _disagreement(meta: Metadata, wanted: ComputedPositions) -> str:
    """Return why libllama would compute something else from a file; empty if it would not."""
    got = compute_from_metadata(meta, None)
    if set(wanted.layers) == {"all"}:
        # What all layers have is wanted of each kind that the file has.
        wanted = replace(wanted, layers=dict.fromkeys(got.layers, wanted.layers["all"]))
    return disagreement(got, wanted)


def _nearly_equal(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Return True if two rows of float64 numbers are equal but for rounding."""
    return all(abs(x - y) <= 1e-9 * abs(y) for x, y in zip(a, b, strict=True))


def _edit_of_keys(meta: Metadata, keys: dict[str, Any], freqs: tuple[float, ...] | None) -> Edit:
    if keys["attn_factor"] == 1 and "attn_factor" not in meta.given:
        keys.pop("attn_factor")
    drop = tuple(name for name in SCALING_KEYS if name in meta.given and name not in keys)
    keys = {k: v for k, v in keys.items() if k not in meta.given or getattr(meta, k) != v}
    lines = [_key_line(meta, name, value) for name, value in keys.items()]
    lines += [f"- {meta.architecture}.{KEYS[k]}: {_as_text(getattr(meta, k))}" for k in drop]
    lines += _tensor_lines(meta, freqs)
    return Edit(keys, drop, freqs, tuple(lines))


def _key_line(meta: Metadata, name: str, value: Any) -> str:
    """Return the line of a key that is new (+) or replaced (old -> new)."""
    key = f"{meta.architecture}.{KEYS[name]}"
    if name in meta.given:
        return f"  {key}: {_as_text(getattr(meta, name))} -> {_as_text(value)}"
    return f"+ {key}: {_as_text(value)}"


def _tensor_lines(meta: Metadata, freqs: tuple[float, ...] | None) -> list[str]:
    """Return a line for each tensor of divisors that is written, replaced or removed."""
    if freqs is None:
        return []
    tensor = f"{FACTORS['rope_freqs']}: f32[{len(freqs)}]"
    lines = [f"+ {tensor}" if meta.rope_freqs is None else f"  {tensor}, written anew"]
    gone = [name for name in ("factors_long", "factors_short") if getattr(meta, name) is not None]
    return lines + [f"- {FACTORS[name]}" for name in gone]


def _as_text(value: Any) -> str:
    """Return a value for a message: text unchanged, a number in few digits."""
    return value if isinstance(value, str) else format(value, "g")


def metadata_after_edit(meta: Metadata, edit: Edit) -> Metadata:
    """Return the metadata that the file will have after an edit."""
    defaults = {f.name: f.default for f in fields(Metadata)}
    dropped = {name: defaults[name] for name in edit.drop}
    given = (meta.given - set(edit.drop)) | set(edit.keys)
    tensors: dict[str, Any] = {}
    if edit.rope_freqs is not None:
        tensors = {"rope_freqs": edit.rope_freqs, "factors_long": None, "factors_short": None}
    return replace(meta, **dropped, **edit.keys, **tensors, given=frozenset(given))


def write_edited_copy(path: Path, out: Path, edit: Edit, wanted: ComputedPositions) -> None:
    """Write the edited copy and prove it by reading it back; nothing is left where that fails. All
    that the edit does not name is copied byte for byte.

    Raises: ValueError where `out` exists or libllama would not compute what is wanted.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; give a new file.")
    with open_ordinary(path) as file, atomically(out) as partial:
        header = read_header(file, path)
        with open_to_change(partial) as target:
            _copy_edited(file, header, edit, target)
        if reason := _disagreement(read_metadata(partial), wanted):
            raise ValueError(f"not written, the proof failed: {reason}.")


def _copy_edited(file: BinaryIO, header: Header, edit: Edit, target: BinaryIO) -> None:
    """Write header and data of the edited file."""
    architecture = header.fields["general.architecture"].value
    changed = {*edit.drop, *edit.keys}
    gone = {f"{architecture}.{keys[n]}" for keys in (KEYS, OLD_KEYS) for n in changed & keys.keys()}
    kept = [each for each in header.fields.values() if each.name not in gone]
    new_keys = [
        _encoded_key(header.byte_order, f"{architecture}.{KEYS[name]}", name, value)
        for name, value in edit.keys.items()
    ]
    replaced_names = set(FACTORS.values()) if edit.rope_freqs is not None else set()
    byte_counts = _bytes_per_tensor(header)
    tensors = [t for t in header.tensors if t.name.rpartition("blk.0.")[2] not in replaced_names]
    factors = b""
    if edit.rope_freqs is not None:
        factors = struct.pack(f"{header.byte_order}{len(edit.rope_freqs)}f", *edit.rope_freqs)

    num_tensors = len(tensors) + bool(factors)
    target.write(b"GGUF")
    target.write(
        struct.pack(
            f"{header.byte_order}IQQ", header.version, num_tensors, len(kept) + len(new_keys)
        )
    )
    for each in kept:
        _copy_bytes(file, target, each.start, each.stop)
    for encoded in new_keys:
        target.write(encoded)
    offset = 0
    for tensor in tensors:
        _copy_bytes(file, target, tensor.start, tensor.stop - 8)
        target.write(struct.pack(f"{header.byte_order}Q", offset))
        offset += round_up(byte_counts[tensor.name], header.alignment)
    if factors:
        name = FACTORS["rope_freqs"].encode()
        target.write(struct.pack(f"{header.byte_order}Q{len(name)}s", len(name), name))
        tensor_info = (1, len(edit.rope_freqs or ()), F32, offset)
        target.write(struct.pack(f"{header.byte_order}IQIQ", *tensor_info))
    _pad(target, header.alignment)
    for tensor in tensors:
        start = header.data_start + tensor.offset
        _copy_bytes(file, target, start, start + byte_counts[tensor.name])
        _pad(target, header.alignment)
    target.write(factors)
    _pad(target, header.alignment)


def _bytes_per_tensor(header: Header) -> dict[str, int]:
    """Return, by tensor, the number of bytes from its data to the next tensor's, or to the end of
    the file."""
    ordered = sorted(header.tensors, key=lambda tensor: tensor.offset)
    ends = [tensor.offset for tensor in ordered[1:]] + [header.file_size - header.data_start]
    return {tensor.name: end - tensor.offset for tensor, end in zip(ordered, ends, strict=True)}


def _encoded_key(byte_order: str, key: str, name: str, value: Any) -> bytes:
    """Return the bytes of a key with its value in the header. name: its field of Metadata."""
    data = key.encode()
    head = struct.pack(f"{byte_order}Q{len(data)}s", len(data), data)
    if isinstance(value, str):
        text = value.encode()
        return head + struct.pack(f"{byte_order}IQ{len(text)}s", STRING, len(text), text)
    if name == "context_length":
        return head + struct.pack(f"{byte_order}II", UINT32, value)
    return head + struct.pack(f"{byte_order}If", FLOAT32, value)


def _copy_bytes(file: BinaryIO, target: BinaryIO, start: int, stop: int) -> None:
    """Copy bytes of one file to another."""
    file.seek(start)
    bytes_left = stop - start
    while bytes_left > 0:
        piece = file.read(min(bytes_left, PIECE))
        if not piece:
            raise ValueError("the file became shorter while it was copied.")
        target.write(piece)
        bytes_left -= len(piece)


def _pad(target: BinaryIO, alignment: int) -> None:
    """Write zeros up to the next multiple of the alignment."""
    target.write(bytes(round_up(target.tell(), alignment) - target.tell()))
