"""The header of a safetensors file: names, dtypes and places of its tensors, no weights."""

import os
from pathlib import Path
from typing import Any

from posenc.files.opening import open_ordinary
from posenc.files.sealed_json import parse_bounded_json

LARGEST_HEADER = 100 << 20


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return dtype, shape and data_offsets by tensor name, and the offset where data begin.

    Raises: ValueError where the file is damaged or announces more than it has.
    """
    with open_ordinary(path) as file:
        whole = os.fstat(file.fileno()).st_size
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(LARGEST_HEADER, whole - 8):
            raise ValueError(f"{path}: damaged safetensors file, a header of {size} bytes.")
        text = file.read(size)
    try:
        value = parse_bounded_json(text.decode())
    except ValueError as error:
        raise ValueError(f"{path}: damaged safetensors file: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged safetensors file, its header is no object.")
    tensors = {k: v for k, v in value.items() if k != "__metadata__"}
    for name, info in tensors.items():
        if not _is_tensor_info(info, whole - 8 - size):
            raise ValueError(
                f"{path}: damaged safetensors file, {name!r} has no place, or one that ends "
                "outside of the file."
            )
    return tensors, 8 + size


def _is_tensor_info(info: Any, end: int) -> bool:
    """Return True for a tensor's dtype, shape, and two offsets in order up to `end`."""
    if not isinstance(info, dict) or not isinstance(info.get("dtype"), str):
        return False
    shape, place = info.get("shape"), info.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(place, list) or len(place) != 2:
        return False
    return all(type(n) is int and n >= 0 for n in shape + place) and place[0] <= place[1] <= end
