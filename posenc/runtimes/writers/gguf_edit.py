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
    read_gguf_header,
    round_up,
)
from posenc.runtimes.files.gguf_metadata import (
    KEY_OF_FIELD,
    OLD_KEY_OF_FIELD,
    TENSOR_OF_FIELD,
    Metadata,
    read_metadata,
)
from posenc.runtimes.known.llama_cpp import compute_from_metadata

SCALING_KEYS = tuple(
    "scaling_type scaling_factor original_length beta_fast beta_slow yarn_attn_factor "
    "yarn_ext_factor log_multiplier attn_factor".split()
)

BYTES_AT_ONCE = 1 << 24
"""Bytes that are copied at once."""
FULL_KIND, SLIDING_KIND = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Edit:
    """The changes from a GGUF file to its copy.

    new_values: field of Metadata -> new value. dropped_fields: those whose keys are removed.
    rope_freqs: divisor of each unscaled frequency, None to leave the file's tensors. lines: the
    changes in words.
    """

    new_values: Mapping[str, Any]
    dropped_fields: tuple[str, ...] = ()
    rope_freqs: tuple[float, ...] | None = None
    lines: tuple[str, ...] = field(default=())


def meaning_of_metadata(meta: Metadata) -> ComputedPositions:
    """Return what the author of a file means by its keys, whether or not libllama reads them: the
    converter writes betas and yarn_attn_factor for every architecture, libllama reads them for two.

    Raises: ValueError where libllama refuses the file, or longrope has lost its divisors: what is
        left is not what was meant.
    """
    if meta.lost_factors:
        lost_in_words = " and ".join(TENSOR_OF_FIELD[name] for name in meta.lost_factors)
        raise ValueError(
            f"{meta.architecture}.{KEY_OF_FIELD['scaling_type']} is longrope and the file has lost "
            f"{lost_in_words}: nothing in it says what was meant. Convert the model again, or "
            "give its own config by --like CONFIG."
        )
    try:
        computed = compute_from_metadata(meta, None)
    except RefusedError as refused:
        raise ValueError(f"{refused}; --like CONFIG says what is meant.") from refused
    rotations = dict(computed.rotations)
    if meta.scaling_type != "yarn" or not rotations:
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
    full_rotation = LayerRotation(
        inv_freq, (usual_factor if stated_factor is None else stated_factor) * meta.attn_factor
    )
    return replace(
        computed,
        rotations={**rotations, FULL_KIND if FULL_KIND in rotations else "all": full_rotation},
    )


def plan_edit(
    meta: Metadata,
    wanted_positions: ComputedPositions,
    bases: Mapping[str, float],
    context_length: int,
) -> Edit:
    """Return the edit after which libllama computes `wanted_positions` from the file.

    bases: the base of each kind of layer. context_length: the new context_length.

    Raises: ValueError where no keys and tensors of the architecture give it.
    """
    rotations = wanted_positions.rotations
    full_rotation = rotations.get(FULL_KIND, rotations.get("all"))
    if full_rotation is None:
        kinds_in_words = (
            f"layers of the kinds {', '.join(rotations)}" if rotations else "no layer that rotates"
        )
        raise ValueError(f"it has {kinds_in_words}, which GGUF has no keys for")
    if len(full_rotation.inv_freq) != meta.dimension_count // 2:
        raise ValueError(
            f"{meta.architecture}: {len(full_rotation.inv_freq)} rotated pairs are wanted, the "
            f"file has {meta.dimension_count // 2}."
        )
    theta = bases[FULL_KIND if FULL_KIND in rotations else "all"]
    new_values: dict[str, Any] = {"freq_base": theta, "context_length": context_length}
    if SLIDING_KIND in rotations:
        new_values["freq_base_swa"] = bases[SLIDING_KIND]
    if edit_with_old_scaling := _edit_that_keeps_scaling(meta, new_values, wanted_positions):
        return edit_with_old_scaling
    reasons = []
    for scaling_values, divisors in _scaling_candidates(meta, full_rotation, theta):
        edit = _edit_of_keys(meta, {**new_values, **scaling_values}, divisors)
        try:
            reason = _disagreement(metadata_after_edit(meta, edit), wanted_positions)
        except RefusedError as refused:
            reason = str(refused)
        if not reason:
            return edit
        reasons.append(reason)
    raise ValueError(f"{reasons[0]}; no other keys or tensors of {meta.architecture} say it.")


def _edit_that_keeps_scaling(
    meta: Metadata, new_values: Mapping[str, Any], wanted_positions: ComputedPositions
) -> Edit | None:
    """Return the edit that leaves the file's scaling unchanged; None where libllama would then
    compute something else than wanted, or change it with the context in another way.

    So a file that is right keeps both its lists of divisors: every other candidate has one list.
    """
    values_present = {
        name: getattr(meta, name) for name in SCALING_KEYS if name in meta.given_fields
    }
    # _edit_of_keys needs attn_factor, and leaves a 1 out that the file does not have.
    edit = _edit_of_keys(
        meta, {**new_values, "attn_factor": meta.attn_factor, **values_present}, None
    )
    try:
        # The edit leaves the scaling as it is: the file says how that changes with the context.
        switches_alike = compute_from_metadata(meta, None).switch == wanted_positions.switch
        return (
            edit
            if switches_alike
            and not _disagreement(metadata_after_edit(meta, edit), wanted_positions)
            else None
        )
    except RefusedError:
        return None


def _scaling_candidates(
    meta: Metadata, full_rotation: LayerRotation, theta: float
) -> Iterator[tuple[dict[str, Any], tuple[float, ...] | None]]:
    """Yield (keys of the scaling, rope_freqs.weight) that give the rotation of the full-attention
    layers, the simplest first; None for no such tensor."""
    dim, multiplier = meta.dimension_count, full_rotation.multiplier
    plain_inv_freq = float64_formulas.unscaled_frequencies(dim, theta)
    if _nearly_equal(full_rotation.inv_freq, plain_inv_freq):
        yield {"attn_factor": multiplier}, None
    ratios = tuple(
        unscaled / frequency if frequency else STOPPING_DIVISOR
        for unscaled, frequency in zip(plain_inv_freq, full_rotation.inv_freq, strict=True)
    )
    if meta.scaling_type == "yarn":
        yarn_inv_freq = float64_formulas.yarn_frequencies(
            dim, theta, meta.scaling_factor, meta.original_length
        )
        if _nearly_equal(full_rotation.inv_freq, yarn_inv_freq):
            usual_multiplier = float64_formulas.yarn_attention_factor(meta.scaling_factor)
            yarn_values = {name: getattr(meta, name) for name in SCALING_KEYS[:3]}
            yield {**yarn_values, "attn_factor": multiplier / usual_multiplier}, None
    if all(math.isclose(r, ratios[0], rel_tol=1e-9) for r in ratios):
        linear_values = {"scaling_type": "linear", "scaling_factor": ratios[0]}
        yield {**linear_values, "attn_factor": multiplier}, None
    yield {"attn_factor": multiplier}, ratios


def _disagreement(meta: Metadata, wanted_positions: ComputedPositions) -> str:
    """Return why libllama would compute something else from a file; empty if it would not."""
    computed = compute_from_metadata(meta, None)
    if set(wanted_positions.rotations) == {"all"}:
        # What all layers have is wanted of each kind that the file has.
        wanted_positions = replace(
            wanted_positions,
            rotations=dict.fromkeys(computed.rotations, wanted_positions.rotations["all"]),
        )
    return disagreement(computed, wanted_positions)


def _nearly_equal(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Return True if two rows of float64 numbers are equal but for rounding."""
    return all(abs(x - y) <= 1e-9 * abs(y) for x, y in zip(a, b, strict=True))


def _edit_of_keys(
    meta: Metadata, new_values: dict[str, Any], divisors: tuple[float, ...] | None
) -> Edit:
    """Return the edit after which the file has these values, "attn_factor" among them, and of
    SCALING_KEYS no others; values that the file has already are left out.

    divisors: the new rope_freqs.weight; None to leave the file's tensors.
    """
    if new_values["attn_factor"] == 1 and "attn_factor" not in meta.given_fields:
        new_values.pop("attn_factor")
    dropped_fields = tuple(
        name for name in SCALING_KEYS if name in meta.given_fields and name not in new_values
    )
    new_values = {
        name: value
        for name, value in new_values.items()
        if name not in meta.given_fields or getattr(meta, name) != value
    }
    lines = [_key_line(meta, name, value) for name, value in new_values.items()]
    lines += [
        f"- {meta.architecture}.{KEY_OF_FIELD[name]}: {_as_text(getattr(meta, name))}"
        for name in dropped_fields
    ]
    lines += _tensor_lines(meta, divisors)
    return Edit(new_values, dropped_fields, divisors, tuple(lines))


def _key_line(meta: Metadata, name: str, value: Any) -> str:
    """Return the line of a key that is new (+) or replaced (old -> new)."""
    key = f"{meta.architecture}.{KEY_OF_FIELD[name]}"
    if name in meta.given_fields:
        return f"  {key}: {_as_text(getattr(meta, name))} -> {_as_text(value)}"
    return f"+ {key}: {_as_text(value)}"


def _tensor_lines(meta: Metadata, divisors: tuple[float, ...] | None) -> list[str]:
    """Return a line for each tensor of divisors that is written, replaced or removed."""
    if divisors is None:
        return []
    tensor_in_words = f"{TENSOR_OF_FIELD['rope_freqs']}: f32[{len(divisors)}]"
    lines = [
        f"+ {tensor_in_words}" if meta.rope_freqs is None else f"  {tensor_in_words}, written anew"
    ]
    removed_fields = [
        name for name in ("factors_long", "factors_short") if getattr(meta, name) is not None
    ]
    return lines + [f"- {TENSOR_OF_FIELD[name]}" for name in removed_fields]


def _as_text(value: Any) -> str:
    """Return a value for a message: text unchanged, a number in few digits."""
    return value if isinstance(value, str) else format(value, "g")


def metadata_after_edit(meta: Metadata, edit: Edit) -> Metadata:
    """Return the metadata that the file will have after an edit."""
    defaults = {f.name: f.default for f in fields(Metadata)}
    defaults_of_dropped = {name: defaults[name] for name in edit.dropped_fields}
    given_fields = (meta.given_fields - set(edit.dropped_fields)) | set(edit.new_values)
    divisor_fields: dict[str, Any] = {}
    if edit.rope_freqs is not None:
        divisor_fields = {
            "rope_freqs": edit.rope_freqs,
            "factors_long": None,
            "factors_short": None,
        }
    return replace(
        meta,
        **defaults_of_dropped,
        **edit.new_values,
        **divisor_fields,
        given_fields=frozenset(given_fields),
    )


def write_edited_copy(
    path: Path, copy_path: Path, edit: Edit, wanted_positions: ComputedPositions
) -> None:
    """Write the edited copy and prove it by reading it back; nothing is left where that fails. All
    that the edit does not name is copied byte for byte.

    Raises: ValueError where `copy_path` exists or libllama would not compute what is wanted.
    """
    if copy_path.exists():
        raise ValueError(f"{copy_path} exists already; give a new file.")
    with open_ordinary(path) as file, atomically(copy_path) as partial_path:
        header = read_gguf_header(file, path)
        with open_to_change(partial_path) as target:
            _copy_edited(file, header, edit, target)
        if reason := _disagreement(read_metadata(partial_path), wanted_positions):
            raise ValueError(f"not written, the proof failed: {reason}.")


def _copy_edited(file: BinaryIO, header: Header, edit: Edit, target: BinaryIO) -> None:
    """Write header and data of the edited file."""
    architecture = header.fields["general.architecture"].value
    changed_fields = {*edit.dropped_fields, *edit.new_values}
    removed_keys = {
        f"{architecture}.{keys[field_name]}"
        for keys in (KEY_OF_FIELD, OLD_KEY_OF_FIELD)
        for field_name in changed_fields & keys.keys()
    }
    kept_fields = [
        kept_field for kept_field in header.fields.values() if kept_field.name not in removed_keys
    ]
    encoded_keys = [
        _encoded_key(header.byte_order, f"{architecture}.{KEY_OF_FIELD[name]}", name, value)
        for name, value in edit.new_values.items()
    ]
    replaced_names = set(TENSOR_OF_FIELD.values()) if edit.rope_freqs is not None else set()
    byte_counts = _bytes_per_tensor(header)
    kept_tensors = [
        t for t in header.tensors if t.name.rpartition("blk.0.")[2] not in replaced_names
    ]
    factor_bytes = b""
    if edit.rope_freqs is not None:
        factor_bytes = struct.pack(f"{header.byte_order}{len(edit.rope_freqs)}f", *edit.rope_freqs)

    num_tensors = len(kept_tensors) + bool(factor_bytes)
    target.write(b"GGUF")
    target.write(
        struct.pack(
            f"{header.byte_order}IQQ",
            header.version,
            num_tensors,
            len(kept_fields) + len(encoded_keys),
        )
    )
    for kept_field in kept_fields:
        _copy_bytes(file, target, kept_field.start, kept_field.stop)
    for encoded_key in encoded_keys:
        target.write(encoded_key)
    offset = 0
    for tensor in kept_tensors:
        _copy_bytes(file, target, tensor.start, tensor.stop - 8)
        target.write(struct.pack(f"{header.byte_order}Q", offset))
        offset += round_up(byte_counts[tensor.name], header.alignment)
    if factor_bytes:
        encoded_name = TENSOR_OF_FIELD["rope_freqs"].encode()
        target.write(
            struct.pack(
                f"{header.byte_order}Q{len(encoded_name)}s", len(encoded_name), encoded_name
            )
        )
        tensor_info = (1, len(edit.rope_freqs or ()), F32, offset)
        target.write(struct.pack(f"{header.byte_order}IQIQ", *tensor_info))
    _pad(target, header.alignment)
    for tensor in kept_tensors:
        start = header.data_start + tensor.offset
        _copy_bytes(file, target, start, start + byte_counts[tensor.name])
        _pad(target, header.alignment)
    target.write(factor_bytes)
    _pad(target, header.alignment)


def _bytes_per_tensor(header: Header) -> dict[str, int]:
    """Return, by tensor, the number of bytes from its data to the next tensor's, or to the end of
    the file."""
    ordered_tensors = sorted(header.tensors, key=lambda tensor: tensor.offset)
    ends = [tensor.offset for tensor in ordered_tensors[1:]] + [
        header.file_size - header.data_start
    ]
    return {
        tensor.name: end - tensor.offset for tensor, end in zip(ordered_tensors, ends, strict=True)
    }


def _encoded_key(byte_order: str, key: str, name: str, value: Any) -> bytes:
    """Return the bytes of a key with its value in the header. name: its field of Metadata."""
    encoded_name = key.encode()
    encoded_start = struct.pack(
        f"{byte_order}Q{len(encoded_name)}s", len(encoded_name), encoded_name
    )
    if isinstance(value, str):
        encoded_text = value.encode()
        return encoded_start + struct.pack(
            f"{byte_order}IQ{len(encoded_text)}s", STRING, len(encoded_text), encoded_text
        )
    if name == "context_length":
        return encoded_start + struct.pack(f"{byte_order}II", UINT32, value)
    return encoded_start + struct.pack(f"{byte_order}If", FLOAT32, value)


def _copy_bytes(file: BinaryIO, target: BinaryIO, start: int, stop: int) -> None:
    """Copy bytes of one file to another."""
    file.seek(start)
    bytes_left = stop - start
    while bytes_left > 0:
        piece = file.read(min(bytes_left, BYTES_AT_ONCE))
        if not piece:
            raise ValueError("the file became shorter while it was copied.")
        target.write(piece)
        bytes_left -= len(piece)


def _pad(target: BinaryIO, alignment: int) -> None:
    """Write zeros up to the next multiple of the alignment."""
    target.write(bytes(round_up(target.tell(), alignment) - target.tell()))
