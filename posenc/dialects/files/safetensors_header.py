"""The header of a safetensors file: names, dtypes and places of its tensors, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from posenc.dialects.files.json_object import require_ordinary

LARGEST_HEADER = 100 << 20


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return dtype, shape and data_offsets by tensor name, and the offset where data begin.

    Raises: ValueError where the file is damaged.
    """
    require_ordinary(path)
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= LARGEST_HEADER:
            raise ValueError(f"{path}: damaged safetensors file, a header of {size} bytes.")
        text = file.read(size)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: damaged safetensors file: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged safetensors file, its header is no object.")
    tensors = {k: v for k, v in value.items() if k != "__metadata__"}
    for name, info in tensors.items():
        known = isinstance(info, dict) and {"dtype", "shape", "data_offsets"} <= info.keys()
        if not known or len(info["data_offsets"]) != 2:
            raise ValueError(f"{path}: damaged safetensors file, {name} has no place.")
    return tensors, 8 + size
