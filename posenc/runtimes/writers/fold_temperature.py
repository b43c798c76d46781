"""Fold a temperature into the weights of q, so that no key needs to express it.

Multiplying cos and sin by t multiplies the rotary part of q . k by t^2. Multiplying those rows of
q_proj (weight and bias) by t^2 does the same, or q_norm's weight if queries are normalized after
it.
"""

from pathlib import Path

import numpy as np

from posenc.runtimes.config_model import Model
from posenc.runtimes.writers.weight_rows import (
    NORMS_AFTER_ROTATION,
    RotatedRows,
    find_rotated_rows,
    require_rows_in_all_layers,
    rewrite_tensors,
)

FAMILIES_ADDING_ONE = frozenset(
    "gemma3 minimax_m3_vl qwen3_5 qwen3_5_moe qwen3_next qwen4_exp step3p7 t5gemma2".split()
)
"""Families, without "_text" and the like, whose norms of q and k multiply by 1 + weight."""
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


def _norm_adds_one(model_type: str) -> bool:
    """Return True if a family's norms of q and k multiply by 1 + weight."""
    family = model_type
    for part in ("_text", "_encoder", "_decoder"):
        family = family.removesuffix(part)
    return family in FAMILIES_ADDING_ONE


def why_not_foldable(folder: Path, model: Model) -> str:
    """Return why a temperature cannot be folded into a folder's weights; empty if it can."""
    try:
        query_rows_to_scale(folder, model)
    except ValueError as error:
        return str(error)
    return ""


def query_rows_to_scale(folder: Path, model: Model) -> list[RotatedRows]:
    """Return the rows to scale for a temperature: those of q, or of q's norm in layers that have
    one.

    Raises: ValueError where the rows are not to be found or cannot be scaled exactly.
    """
    rows = find_rotated_rows(folder, model)
    require_rows_in_all_layers(rows, model, "q")
    return _scalable_query_rows(rows, {r.layer for r in rows if r.is_norm and r.side == "q"})


def adapter_rows_to_scale(adapter: Path, base: Path, model: Model) -> list[RotatedRows]:
    """Return the rows of a LoRA adapter to scale with its base model: those of q's B, in layers
    whose base scales the rows of q and not of its norm.

    Raises: ValueError as `query_rows_to_scale` does for the base, or where the adapter's rows are
    not known.
    """
    normed_layers = {r.layer for r in query_rows_to_scale(base, model) if r.is_norm}
    return _scalable_query_rows(
        [r for r in find_rotated_rows(adapter, model) if r.layer not in normed_layers], set()
    )


def _scalable_query_rows(rows: list[RotatedRows], normed_layers: set[int]) -> list[RotatedRows]:
    """Return the rows of q, or of its norm in the layers `normed_layers`.

    Raises: ValueError where they cannot be scaled exactly, or scaling has no effect.
    """
    for r in rows:
        if r.is_norm and any(f".{name}." in r.entry.name for name in NORMS_AFTER_ROTATION):
            raise ValueError(
                f"{r.entry.name} normalises rotated queries and keys: a temperature of their "
                "rotation has no effect in this model, and q's rows cannot have one"
            )
    wanted_rows = [r for r in rows if "q" in r.side and r.is_norm == (r.layer in normed_layers)]
    for r in wanted_rows:
        if r.entry.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{r.entry.name} is {r.entry.dtype}: rows cannot be scaled")
        if r.side == "qk" and "qkv_proj." not in r.entry.name:
            raise ValueError(f"{r.entry.name}: folding into this packing is not known")
    return wanted_rows


def fold_multiplier(folder: Path, model: Model, multiplier: float) -> list[str]:
    """Multiply q's rotated rows by multiplier^2 in the safetensors of a folder, in place.

    Returns: the names of the tensors that changed.
    Raises: ValueError as `query_rows_to_scale` does; nothing is changed then.
    """
    return scale_rows(query_rows_to_scale(folder, model), model, multiplier**2)


def scale_rows(wanted_rows: list[RotatedRows], model: Model, factor: float) -> list[str]:
    """Multiply the wanted rows by `factor` in place and return the names of the changed tensors.

    A factor m of cos and sin multiplies the rotated q and k alike, so scores by m^2. The same
    scores come from rows of one side, q or k, multiplied by factor = m^2.
    """
    for rows in wanted_rows:
        adds_one = rows.is_norm and _norm_adds_one(model.model_type)
        # In a tensor of q and k together, the heads of q come first.
        groups = rows.groups[: model.num_heads] if rows.side == "qk" else rows.groups

        def change(
            name: str,
            values: np.ndarray,
            groups: tuple[slice, ...] = groups,
            is_plus_one: bool = adds_one,
        ) -> np.ndarray:
            for group in groups:
                part = values[group]
                part[...] = factor * (1 + part) - 1 if is_plus_one else factor * part
            return values

        rewrite_tensors(rows.path, [rows.entry.name], change)
    return [rows.entry.name for rows in wanted_rows]
