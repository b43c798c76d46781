"""Permute rows of q and k from interleaved pairs (2i, 2i+1) to half-split ones (i, i + d/2), and
back.

Rows are moved unchanged, in any dtype: weights and biases, norms of q and k, LoRA's B, packed
projections, grouped heads, partial rotation. Both sides move alike, so q.k stays the same.
"""

from pathlib import Path

import numpy as np

from posenc.files.opening import open_to_change
from posenc.runtimes.config_model import Model
from posenc.runtimes.weights.rows import RotatedRows, find_rotated_rows, require_rows_in_all_layers


def permute_folder(folder: Path, model: Model, *, to_interleaved: bool) -> list[str]:
    """Permute the rotated rows of q and k in the safetensors of a folder, in place.

    Returns: the names of the tensors that changed.
    Raises: ValueError where rows of q or k are not to be found; nothing is changed then.
    """
    rows = find_rotated_rows(folder, model)
    adapter = all("lora_" in r.entry.name for r in rows)
    if not rows:
        raise ValueError("the folder has no rows of q and k that are known")
    if not adapter:
        require_rows_in_all_layers(rows, model, "q")
        require_rows_in_all_layers(rows, model, "k")
    for r in rows:
        _permute_rows(r, to_interleaved=to_interleaved)
    return [r.entry.name for r in rows]


def _permute_rows(rows: RotatedRows, *, to_interleaved: bool) -> None:
    """Permute the rotated rows of one tensor in its file."""
    entry = rows.entry
    count = entry.shape[0]
    with open_to_change(rows.path) as file:
        file.seek(entry.start)
        # Rows are moved as bytes, so that any dtype is moved exactly.
        data = np.frombuffer(file.read(entry.stop - entry.start), np.uint8)
        table = data.reshape(count, -1).copy()
        for group in rows.groups:
            width = group.stop - group.start
            table[group] = table[group][row_permutation(width, to_interleaved=to_interleaved)]
        file.seek(entry.start)
        file.write(table.tobytes())


def row_permutation(width: int, *, to_interleaved: bool) -> list[int]:
    """Return the permutation new[i] = old[order[i]] of the `width` rotary dimensions of one head.

    >>> row_permutation(6, to_interleaved=False)
    [0, 2, 4, 1, 3, 5]
    """
    half = width // 2
    if to_interleaved:
        return [i for t in range(half) for i in (t, t + half)]
    return [*range(0, width, 2), *range(1, width, 2)]
