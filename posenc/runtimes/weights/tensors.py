"""Change single tensors of a safetensors file in place, without loading the others."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posenc.files.opening import open_to_change
from posenc.runtimes.files.safetensors_header import read_header

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


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
    header, offset = read_header(path)
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
    by_name = {entry.name: entry for entry in read_entries(path)}
    with open_to_change(path) as file:
        for name in names:
            entry = by_name[name]
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
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64)
    if dtype not in DTYPES:
        raise ValueError(f"{dtype}: expected one of {', '.join(DTYPES)}, BF16")
    return np.frombuffer(data, DTYPES[dtype]).astype(np.float64)


def encode_floats(values: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of float64 values in a dtype, rounded to nearest, ties to even."""
    if dtype != "BF16":
        return values.astype(DTYPES[dtype]).tobytes()
    bits = values.astype(np.float32).view(np.uint32)
    # Half of the last kept bit, less 1 where that bit is 0, so that ties go to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
