"""A temperature folded into the weights of q, so that no key needs to say it.

logits = (q . k) and cos, sin times t give t^2 on the rotated channels: the same as their rows of
q_proj (weight and bias) times t^2, or q_norm's weight where queries are normalised after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posenc.dialects.model import Model
from posenc.dialects.writers.tensors import Entry, entries, rewrite

LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:self_attn|attention|attn)\.(\w+)\.(weight|bias)$")
ONE_PLUS_WEIGHT = ("gemma", "vaultgemma", "t5gemma")
"""Families whose norms multiply by 1 + weight."""
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Scaling:
    """Rows of one tensor, by their share of the leading axis, that are multiplied."""

    tensor: str
    rows: tuple[slice, ...]
    one_plus: bool = False


def foldable(folder: Path, model: Model) -> str:
    """Why a temperature cannot be folded into a folder's weights; empty where it can."""
    try:
        list(plan(folder, model))
    except ValueError as error:
        return str(error)
    return ""


def plan(folder: Path, model: Model) -> Iterator[tuple[Path, list[Scaling]]]:
    """Per file what is to be scaled.

    Raises: ValueError where there are no safetensors, or a layer's q is not to be found, packed in
    an unknown way, or quantised.
    """
    if model.config.get("quantization_config"):
        raise ValueError("the weights are quantised: rows cannot be scaled exactly")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no safetensors to fold a temperature into")
    found: dict[int, set[str]] = {}
    planned: list[tuple[Path, list[Scaling]]] = []
    tensors = [(path, entry) for path in files for entry in entries(path)]
    normed = {
        int(m[1]) for _, e in tensors if (m := LAYER.search(e.name)) and m[2] in ("q_norm",)
    } | {int(m[1]) for _, e in tensors if (m := LAYER.search(e.name)) and m[2] == "q_layernorm"}
    for path in files:
        scalings = []
        for owner, entry in tensors:
            match = LAYER.search(entry.name)
            if owner != path or match is None:
                continue
            layer, name, part = int(match[1]), match[2], match[3]
            if layer in model.without_rotation:
                continue
            scaling = _scaling(entry, name, part, model, normed=layer in normed)
            if scaling is not None:
                if entry.dtype not in FLOATS:
                    raise ValueError(f"{entry.name} is {entry.dtype}: rows cannot be scaled")
                found.setdefault(layer, set()).add(name)
                scalings.append(scaling)
        planned.append((path, scalings))
    wanted = set(range(model.num_layers)) - set(model.without_rotation)
    missing = sorted(wanted - set(found))
    if missing:
        raise ValueError(f"found no query weights of the layers {missing[:8]}")
    yield from planned


def _scaling(entry: Entry, name: str, part: str, model: Model, *, normed: bool) -> Scaling | None:
    if name in ("query_key_value", "c_attn", "Wqkv"):
        raise ValueError(f"{entry.name}: folding into this packing of q, k and v is not known")
    if normed:
        return _norm(entry, name, part, model)
    rows = entry.shape[0] if entry.shape else 0
    if model.mla:
        latent = model.config.get("q_lora_rank")
        if name != ("q_b_proj" if latent else "q_proj"):
            return None
        nope = model.size("qk_nope_head_dim", default=128)
        width = nope + model.head_dim
        _require(entry, rows, model.num_heads * width)
        return Scaling(entry.name, _heads(model.num_heads, width, nope, width))
    if name not in ("q_proj", "qkv_proj"):
        return None
    if name == "q_proj":
        _require(entry, rows, model.num_heads * model.head_dim)
    rotated = rotary_dim(model)
    return Scaling(entry.name, _heads(model.num_heads, model.head_dim, 0, rotated))


def rotary_dim(model: Model) -> int:
    """The leading channels of each head that rotate."""
    if not model.owns_partial:
        return model.head_dim
    share = model.config.get("partial_rotary_factor", model.config.get("rotary_pct"))
    if share is None:
        share = model.facts["transformers5"].get("partial_rotary_factor", 1.0)
    return int(model.head_dim * share)


def _norm(entry: Entry, name: str, part: str, model: Model) -> Scaling | None:
    if name not in ("q_norm", "q_layernorm"):
        return None
    if part == "bias":
        raise ValueError(f"{entry.name}: a norm with a bias is not known")
    rotated, width = rotary_dim(model), entry.shape[-1]
    one_plus = model.model_type.startswith(ONE_PLUS_WEIGHT)
    if width == model.head_dim:
        return Scaling(entry.name, (slice(0, rotated),), one_plus)
    if width == model.num_heads * model.head_dim and len(entry.shape) == 1:
        heads = _heads(model.num_heads, model.head_dim, 0, rotated)
        return Scaling(entry.name, heads, one_plus)
    raise ValueError(f"{entry.name}: a norm of shape {list(entry.shape)} is not known")


def _require(entry: Entry, rows: int, expected: int) -> None:
    if rows != expected:
        raise ValueError(f"{entry.name} has {rows} rows, expected {expected}")


def _heads(count: int, width: int, start: int, stop: int) -> tuple[slice, ...]:
    return tuple(slice(h * width + start, h * width + stop) for h in range(count))


def fold(folder: Path, model: Model, multiplier: float) -> list[str]:
    """Multiply q's rotated rows by multiplier^2 in the safetensors of a folder, in place.

    Returns: the names of the tensors that changed.
    Raises: ValueError as `plan` does; nothing is changed then.
    """
    changed = []
    square = multiplier**2
    for path, scalings in list(plan(folder, model)):
        edits: Mapping[str, Any] = {s.tensor: s for s in scalings}

        def change(name: str, values: np.ndarray, edits: Mapping[str, Any] = edits) -> np.ndarray:
            scaling: Scaling = edits[name]
            axis = values if values.ndim else values[None]
            for rows in scaling.rows:
                part = axis[..., rows] if scaling.one_plus or values.ndim == 1 else axis[rows]
                new = square * (1 + part) - 1 if scaling.one_plus else square * part
                part[...] = new
            return values

        rewrite(path, list(edits), change)
        changed += list(edits)
    return changed
