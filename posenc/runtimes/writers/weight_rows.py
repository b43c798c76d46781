"""Find the rotated rows of q and k in a checkpoint's tensors, and permute them or change other
tensors in the file itself.

Rows are permuted from interleaved pairs (2i, 2i+1) to half-split ones (i, i + d/2) or back, and are
moved unchanged, in any dtype: weights and biases, norms of q and k, LoRA's B, packed projections,
grouped heads, partial rotation. Both sides move alike, so q.k stays the same.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.files.opening import open_to_change
from posenc.runtimes.config_model import Model
from posenc.runtimes.files.model_folder import paths_inside, read_safetensors_header

NUMPY_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a safetensors file: its dtype and shape, and the offsets of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(path: Path) -> list[TensorEntry]:
    """Return the entries of a safetensors file's tensors.

    Raises: ValueError where the file is damaged.
    """
    header, offset = read_safetensors_header(path)
    return [
        TensorEntry(
            name, info["dtype"], tuple(info["shape"]), *(offset + n for n in info["data_offsets"])
        )
        for name, info in header.items()
    ]


def rewrite_tensors(
    path: Path, names: Iterable[str], change: Callable[[str, np.ndarray], np.ndarray]
) -> None:
    """Replace tensors by change(name, values as float64), rounded back to their dtype.

    Raises: ValueError for a dtype without exact floats.
    """
    entry_by_name = {entry.name: entry for entry in read_entries(path)}
    with open_to_change(path) as file:
        for name in names:
            entry = entry_by_name[name]
            file.seek(entry.start)
            data = file.read(entry.stop - entry.start)
            values = change(name, decode_floats(data, entry.dtype).reshape(entry.shape))
            file.seek(entry.start)
            file.write(encode_floats(values, entry.dtype))


def decode_floats(data: bytes, dtype: str) -> np.ndarray:
    """Return the values of a tensor's bytes as float64.

    Raises: ValueError for dtypes other than floats of 16 bits or more.
    """
    if dtype == "BF16":  # the upper half of a float32
        bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).astype(np.float64)
    if dtype not in NUMPY_DTYPES:
        raise ValueError(f"{dtype}: expected one of {', '.join(NUMPY_DTYPES)}, BF16")
    return np.frombuffer(data, NUMPY_DTYPES[dtype]).astype(np.float64)


def encode_floats(values: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of float64 values in a dtype, rounded to nearest, ties to even."""
    if dtype != "BF16":
        return values.astype(NUMPY_DTYPES[dtype]).tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    # Half of the last kept bit, less 1 where that bit is 0, so that ties go to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


ATTENTION_TENSOR_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:self_attn|attention|attn)\.(\w+?)(?:\.base_layer)?"
    r"(?:\.(lora_[AB])(?:\.\w+)?)?\.(weight|bias)$"
)
UNKNOWN_PACKINGS = ("c_attn", "Wqkv", "qkv_layer")
SIDE_OF_NORM = {
    "q_norm": "q",
    "q_layernorm": "q",
    "query_layernorm": "q",
    "k_norm": "k",
    "k_layernorm": "k",
    "key_layernorm": "k",
}
"""Names of a normalisation of q or k -> which of them."""
KINDS_THAT_NEVER_ROTATE = ("linear_attention", "mamba", "conv", "recurrent")
"""Kinds of layers that have no queries and keys which rotate."""
GATED_FAMILIES = ("qwen3_next", "qwen3_5", "qwen4_exp")
"""Families whose q_proj has a gate of the output behind the query of each head."""
NORMS_AFTER_ROTATION = ("query_layernorm", "key_layernorm")
"""Those that normalise rotated queries and keys, and undo what multiplies them before."""
NORM_TENSOR_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:self_attn|attention|attn)\.((?:q|k|query|key)_\w*norm[\w.]*)\."
    r"(?:weight|bias)$"
)
NORMS_OF_LATENTS = ("q_a_layernorm", "q_a_norm")
"""Normalisations of a latent from which queries are computed: none of their channels rotates."""


class ShapeError(ValueError):
    """A tensor whose rows do not fit the config."""


@dataclass(frozen=True)
class RotatedRows:
    """A tensor with rows of q or k that rotate.

    side: "q", "k", or "qk" for both packed. groups: per head the rotated rows, along the first
    axis. is_norm: whether it is the weight of a normalisation of q or k. layer: which.
    """

    path: Path
    entry: TensorEntry
    layer: int
    side: str
    groups: tuple[slice, ...]
    is_norm: bool = False


def rotary_dim(model: Model) -> int:
    """Return the number of leading channels of each head that rotate."""
    if not model.supports_partial_rotation or model.is_mla:
        return model.head_dim
    stated_share = (model.config.get("rope_parameters") or {}).get("partial_rotary_factor")
    share = model.rotated_share if stated_share is None else stated_share
    return int(model.head_dim * (1.0 if share is None else share))


def find_rotated_rows(folder: Path, model: Model) -> list[RotatedRows]:
    """Find the rotated rows in a folder's safetensors.

    Raises: ValueError where there are none, or a layer's are not to be found, packed in an unknown
    way, or quantised.
    """
    if model.config.get("quantization_config"):
        raise ValueError("the weights are quantised: rows cannot be changed exactly")
    files = paths_inside(folder, "*.safetensors")
    if not files:
        raise ValueError("the folder has no safetensors")
    found_rows = []
    for path in files:
        for entry in read_entries(path):
            _refuse_unknown_norm(entry.name, model)
            name_match = ATTENTION_TENSOR_NAME.search(entry.name)
            if (
                name_match is None
                or int(name_match[1]) in model.without_rotation
                or name_match[3] == "lora_A"
            ):
                continue
            rows = _rotated_rows_of_tensor(
                path, entry, int(name_match[1]), name_match[2], name_match[4], model
            )
            if rows is not None:
                found_rows.append(rows)
    return found_rows


def _refuse_unknown_norm(name: str, model: Model) -> None:
    """Raise ValueError for a normalisation of q or k whose channels are not known: it would be left
    as it is while the rows of q and k move."""
    name_match = NORM_TENSOR_NAME.search(name)
    if name_match is None or name_match[2] in SIDE_OF_NORM or name_match[2] in NORMS_OF_LATENTS:
        return
    if int(name_match[1]) not in model.without_rotation:
        raise ValueError(f"{name}: this normalisation of q or k is not known")


def check_and_describe_weights(folder: Path, model: Model) -> str:
    """Check a folder's weights, and return in words what was checked: every header, and the shapes
    of q and k where their packing is known.

    Raises: ValueError where a file is damaged or cut, or has no tensors, or rows do not fit the
    config.
    """
    files = paths_inside(folder, "*.safetensors")
    for path in files:
        if not read_entries(path):
            raise ValueError(f"{path}: it has no tensors.")
    what_was_read = f"the headers of {len(files)} weight file{'s' * (len(files) != 1)}"
    try:
        rows = find_rotated_rows(folder, model)
    except ShapeError:
        raise
    except ValueError:
        rows = []  # of a packing that is not known, no shapes can be checked
    return (
        f"{what_was_read} and the shapes of {len(rows)} tensors"
        if rows
        else f"{what_was_read}, no shapes"
    )


def require_rows_in_all_layers(rows: list[RotatedRows], model: Model, side: str) -> None:
    """Raise ValueError if a layer that rotates has no rows of this side, "q" or "k"."""
    sides_with_it = (side, "qk")  # "qk": packed in one tensor
    layers_found = {r.layer for r in rows if r.side in sides_with_it and not r.is_norm}
    layers_that_never_rotate = {
        i for i, kind in enumerate(model.layer_types) if kind in KINDS_THAT_NEVER_ROTATE
    }
    layers_needed = (
        set(range(model.num_layers)) - set(model.without_rotation) - layers_that_never_rotate
    )
    missing_layers = sorted(layers_needed - layers_found)
    if missing_layers:
        side_in_words = {"q": "query", "k": "key"}[side]
        raise ValueError(f"found no {side_in_words} weights of the layers {missing_layers[:8]}")


def _rotated_rows_of_tensor(
    path: Path, entry: TensorEntry, layer_index: int, name: str, part: str, model: Model
) -> RotatedRows | None:
    """Return which rows of a tensor rotate; None for one without rows of q or k."""
    if name in UNKNOWN_PACKINGS:
        raise ValueError(f"{entry.name}: this packing of q, k and v is not known")
    if name in SIDE_OF_NORM:
        return _rows_of_norm(path, entry, layer_index, name, part, model)
    head_width = model.head_dim
    rotated_width = rotary_dim(model)
    num_heads = model.num_heads
    num_kv_heads = model.size("num_key_value_heads", default=num_heads)
    if model.is_mla:
        return _rows_of_latent_attention(path, entry, layer_index, name, model)
    if name == "q_proj":
        gate_width = head_width if model.model_type.startswith(GATED_FAMILIES) else 0
        _require_row_count(entry, num_heads * (head_width + gate_width))
        starts = [h * (head_width + gate_width) for h in range(num_heads)]
        return RotatedRows(path, entry, layer_index, "q", _slices_from(starts, rotated_width))
    if name == "k_proj":
        return RotatedRows(
            path,
            entry,
            layer_index,
            "k",
            _slices_of_heads(entry, num_kv_heads, head_width, rotated_width),
        )
    if name == "qkv_proj":  # q's heads, then k's, then v's
        _require_row_count(entry, (num_heads + 2 * num_kv_heads) * head_width)
        starts = [h * head_width for h in range(num_heads + num_kv_heads)]
        return RotatedRows(path, entry, layer_index, "qk", _slices_from(starts, rotated_width))
    if name == "query_key_value" and model.model_type.startswith("gpt_neox"):
        _require_row_count(entry, 3 * num_heads * head_width)  # per head its q, k and v
        starts = [
            (3 * h + side_index) * head_width for h in range(num_heads) for side_index in (0, 1)
        ]
        return RotatedRows(path, entry, layer_index, "qk", _slices_from(starts, rotated_width))
    return None


def _slices_from(starts: list[int], count: int) -> tuple[slice, ...]:
    """Return slices of `count` rows, one from each start on."""
    return tuple(slice(start, start + count) for start in starts)


def _rows_of_latent_attention(
    path: Path, entry: TensorEntry, layer_index: int, name: str, model: Model
) -> RotatedRows | None:
    rotated_width = model.head_dim
    nope_width = model.size("qk_nope_head_dim", default=128)
    query_rank = model.config.get("q_lora_rank")
    if name == ("q_b_proj" if query_rank else "q_proj"):
        head_width = nope_width + rotated_width
        _require_row_count(entry, model.num_heads * head_width)
        starts = [h * head_width + nope_width for h in range(model.num_heads)]
        return RotatedRows(
            path, entry, layer_index, "q", tuple(slice(s, s + rotated_width) for s in starts)
        )
    if name == "kv_a_proj_with_mqa":
        latent_width = model.size("kv_lora_rank")
        _require_row_count(entry, latent_width + rotated_width)
        return RotatedRows(
            path, entry, layer_index, "k", (slice(latent_width, latent_width + rotated_width),)
        )
    return None


def _rows_of_norm(
    path: Path, entry: TensorEntry, layer_index: int, name: str, part: str, model: Model
) -> RotatedRows | None:
    if part == "bias":
        raise ValueError(f"{entry.name}: a norm with a bias is not known")
    rotated_width, norm_width = rotary_dim(model), entry.shape[-1]
    if len(entry.shape) != 1 or norm_width % model.head_dim:
        raise ValueError(f"{entry.name}: a norm of shape {list(entry.shape)} is not known")
    groups = _slices_of_heads(entry, norm_width // model.head_dim, model.head_dim, rotated_width)
    return RotatedRows(path, entry, layer_index, SIDE_OF_NORM[name], groups, is_norm=True)


def _slices_of_heads(
    entry: TensorEntry, count: int, head_width: int, rotated_width: int
) -> tuple[slice, ...]:
    """Return the first `rotated_width` rows of each of `count` heads of this width.

    Raises: ShapeError for a tensor of another number of rows.
    """
    _require_row_count(entry, count * head_width)
    return tuple(slice(h * head_width, h * head_width + rotated_width) for h in range(count))


def _require_row_count(entry: TensorEntry, expected_rows: int) -> None:
    """Raise ShapeError unless a tensor has so many rows."""
    num_rows = entry.shape[0] if entry.shape else 0
    if num_rows != expected_rows:
        raise ShapeError(
            f"{entry.name} has {num_rows} rows, expected {expected_rows} by config.json."
        )


def permute_folder(folder: Path, model: Model, *, to_interleaved: bool) -> list[str]:
    """Permute the rotated rows of q and k in the safetensors of a folder, in place.

    Returns: the names of the tensors that changed.
    Raises: ValueError where rows of q or k are not to be found; nothing is changed then.
    """
    rows = find_rotated_rows(folder, model)
    is_adapter = all("lora_" in r.entry.name for r in rows)
    if not rows:
        raise ValueError("the folder has no rows of q and k that are known")
    if not is_adapter:
        require_rows_in_all_layers(rows, model, "q")
        require_rows_in_all_layers(rows, model, "k")
    for r in rows:
        _permute_rows(r, to_interleaved=to_interleaved)
    return [r.entry.name for r in rows]


def _permute_rows(rows: RotatedRows, *, to_interleaved: bool) -> None:
    """Permute the rotated rows of one tensor in its file."""
    entry = rows.entry
    num_rows = entry.shape[0]
    with open_to_change(rows.path) as file:
        file.seek(entry.start)
        # Rows are moved as bytes, so that any dtype is moved exactly.
        data = np.frombuffer(file.read(entry.stop - entry.start), np.uint8)
        row_bytes = data.reshape(num_rows, -1).copy()
        for group in rows.groups:
            width = group.stop - group.start
            row_bytes[group] = row_bytes[group][
                row_permutation(width, to_interleaved=to_interleaved)
            ]
        file.seek(entry.start)
        file.write(row_bytes.tobytes())


def row_permutation(num_rotary: int, *, to_interleaved: bool) -> list[int]:
    """Return the permutation new[i] = old[order[i]] of the `num_rotary` rotary dimensions of one
    head.

    >>> row_permutation(6, to_interleaved=False)
    [0, 2, 4, 1, 3, 5]
    """
    half = num_rotary // 2
    if to_interleaved:
        return [i for t in range(half) for i in (t, t + half)]
    return [*range(0, num_rotary, 2), *range(1, num_rotary, 2)]
