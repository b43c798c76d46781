"""Find the rotated rows of q and k in a checkpoint's tensors."""

import re
from dataclasses import dataclass
from pathlib import Path

from posenc.runtimes.config_model import Model
from posenc.runtimes.files.paths_inside import paths_inside
from posenc.runtimes.weights.tensors import TensorEntry, read_entries

LAYER = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:self_attn|attention|attn)\.(\w+?)(?:\.base_layer)?"
    r"(?:\.(lora_[AB])(?:\.\w+)?)?\.(weight|bias)$"
)
UNKNOWN_PACKING = ("c_attn", "Wqkv", "qkv_layer")
NORMS = {
    "q_norm": "q",
    "q_layernorm": "q",
    "query_layernorm": "q",
    "k_norm": "k",
    "k_layernorm": "k",
    "key_layernorm": "k",
}
"""Names of a normalisation of q or k -> which of them."""
NO_ATTENTION = ("linear_attention", "mamba", "conv", "recurrent")
"""Kinds of layers that have no queries and keys which rotate."""
GATED = ("qwen3_next", "qwen3_5", "qwen4_exp")
"""Families whose q_proj has a gate of the output behind the query of each head."""
NORMS_AFTER_ROTATION = ("query_layernorm", "key_layernorm")
"""Those that normalise rotated queries and keys, and undo what multiplies them before."""
NAME_OF_NORM = re.compile(
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
    axis. norm: the weight of a normalisation of q or k. layer: which.
    """

    path: Path
    entry: TensorEntry
    layer: int
    side: str
    groups: tuple[slice, ...]
    norm: bool = False


def rotary_dim(model: Model) -> int:
    """Return the number of leading channels of each head that rotate."""
    if not model.supports_partial_rotation or model.is_mla:
        return model.head_dim
    inner = (model.config.get("rope_parameters") or {}).get("partial_rotary_factor")
    share = model.rotated_share if inner is None else inner
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
    found = []
    for path in files:
        for entry in read_entries(path):
            _refuse_unknown_norm(entry.name, model)
            match = LAYER.search(entry.name)
            if match is None or int(match[1]) in model.without_rotation or match[3] == "lora_A":
                continue
            rows = _rotated_rows_of_tensor(path, entry, int(match[1]), match[2], match[4], model)
            if rows is not None:
                found.append(rows)
    return found


def _refuse_unknown_norm(name: str, model: Model) -> None:
    """Raise ValueError for a normalisation of q or k whose channels are not known: it would be left
    as it is while the rows of q and k move."""
    norm = NAME_OF_NORM.search(name)
    if norm is None or norm[2] in NORMS or norm[2] in NORMS_OF_LATENTS:
        return
    if int(norm[1]) not in model.without_rotation:
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
    said = f"the headers of {len(files)} weight file{'s' * (len(files) != 1)}"
    try:
        rows = find_rotated_rows(folder, model)
    except ShapeError:
        raise
    except ValueError:
        rows = []  # of a packing that is not known, no shapes can be checked
    return f"{said} and the shapes of {len(rows)} tensors" if rows else f"{said}, no shapes"


def require_rows_in_all_layers(rows: list[RotatedRows], model: Model, side: str) -> None:
    """Raise ValueError if a layer that rotates has no rows of this side, "q" or "k"."""
    have = {r.layer for r in rows if side in r.side and not r.norm}
    mixing_otherwise = {i for i, kind in enumerate(model.layer_types) if kind in NO_ATTENTION}
    wanted = set(range(model.num_layers)) - set(model.without_rotation) - mixing_otherwise
    missing = sorted(wanted - have)
    if missing:
        word = {"q": "query", "k": "key"}[side]
        raise ValueError(f"found no {word} weights of the layers {missing[:8]}")


def _rotated_rows_of_tensor(
    path: Path, entry: TensorEntry, layer: int, name: str, part: str, model: Model
) -> RotatedRows | None:
    """Return which rows of a tensor rotate; None for one without rows of q or k."""
    if name in UNKNOWN_PACKING:
        raise ValueError(f"{entry.name}: this packing of q, k and v is not known")
    if name in NORMS:
        return _rows_of_norm(path, entry, layer, name, part, model)
    width = model.head_dim
    rotated = rotary_dim(model)
    heads = model.num_heads
    kv_heads = model.size("num_key_value_heads", default=heads)
    if model.is_mla:
        return _rows_of_latent_attention(path, entry, layer, name, model)
    if name == "q_proj":
        gate = width if model.model_type.startswith(GATED) else 0
        _require_row_count(entry, heads * (width + gate))
        starts = [h * (width + gate) for h in range(heads)]
        return RotatedRows(path, entry, layer, "q", _slices_from(starts, rotated))
    if name == "k_proj":
        return RotatedRows(
            path, entry, layer, "k", _slices_of_heads(entry, kv_heads, width, rotated)
        )
    if name == "qkv_proj":  # q's heads, then k's, then v's
        _require_row_count(entry, (heads + 2 * kv_heads) * width)
        starts = [h * width for h in range(heads + kv_heads)]
        return RotatedRows(path, entry, layer, "qk", _slices_from(starts, rotated))
    if name == "query_key_value" and model.model_type.startswith("gpt_neox"):
        _require_row_count(entry, 3 * heads * width)  # per head its q, k and v
        starts = [(3 * h + part_) * width for h in range(heads) for part_ in (0, 1)]
        return RotatedRows(path, entry, layer, "qk", _slices_from(starts, rotated))
    return None


def _slices_from(starts: list[int], count: int) -> tuple[slice, ...]:
    """Return slices of `count` rows, one from each start on."""
    return tuple(slice(start, start + count) for start in starts)


def _rows_of_latent_attention(
    path: Path, entry: TensorEntry, layer: int, name: str, model: Model
) -> RotatedRows | None:
    rotated = model.head_dim
    nope = model.size("qk_nope_head_dim", default=128)
    latent_q = model.config.get("q_lora_rank")
    if name == ("q_b_proj" if latent_q else "q_proj"):
        width = nope + rotated
        _require_row_count(entry, model.num_heads * width)
        starts = [h * width + nope for h in range(model.num_heads)]
        return RotatedRows(path, entry, layer, "q", tuple(slice(s, s + rotated) for s in starts))
    if name == "kv_a_proj_with_mqa":
        latent = model.size("kv_lora_rank")
        _require_row_count(entry, latent + rotated)
        return RotatedRows(path, entry, layer, "k", (slice(latent, latent + rotated),))
    return None


def _rows_of_norm(
    path: Path, entry: TensorEntry, layer: int, name: str, part: str, model: Model
) -> RotatedRows | None:
    if part == "bias":
        raise ValueError(f"{entry.name}: a norm with a bias is not known")
    rotated, width = rotary_dim(model), entry.shape[-1]
    if len(entry.shape) != 1 or width % model.head_dim:
        raise ValueError(f"{entry.name}: a norm of shape {list(entry.shape)} is not known")
    groups = _slices_of_heads(entry, width // model.head_dim, model.head_dim, rotated)
    return RotatedRows(path, entry, layer, NORMS[name], groups, norm=True)


def _slices_of_heads(entry: TensorEntry, count: int, width: int, rotated: int) -> tuple[slice, ...]:
    """Return the first `rotated` rows of each of `count` heads of this width.

    Raises: ShapeError for a tensor of another number of rows.
    """
    _require_row_count(entry, count * width)
    return tuple(slice(h * width, h * width + rotated) for h in range(count))


def _require_row_count(entry: TensorEntry, expected: int) -> None:
    """Raise ShapeError unless a tensor has so many rows."""
    rows = entry.shape[0] if entry.shape else 0
    if rows != expected:
        raise ShapeError(f"{entry.name} has {rows} rows, expected {expected} by config.json.")
