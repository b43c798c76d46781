"""The keys and factor tensors of a GGUF file, through the `gguf` package."""

import math
import os
from pathlib import Path
from typing import Any

from posenc.dialects.files.gguf_metadata import KEYS, OLD_KEYS, Metadata
from posenc.lazy import require
from posenc.report.files.opened import open_ordinary

FACTORS = {
    "rope_freqs": "rope_freqs.weight",
    "factors_long": "rope_factors_long.weight",
    "factors_short": "rope_factors_short.weight",
}
MAY_BE_ZERO = ("sliding_window", "yarn_ext_factor", "log_multiplier", "original_length")
WHOLE = ("context_length", "dimension_count", "dimension_count_swa", "sliding_window")
LARGEST_LAYERS = 2000
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a value -> its bytes; 8 is a string, 9 an array."""
STRING, ARRAY, DEEPEST = 8, 9, 4
TEXT, LONGEST_TEXT = "bytes of text", 16 << 20
MOST_VALUES = 1 << 22
"""Values of all arrays, keys and tensors: a tokenizer of 262,144 tokens has about a million."""
MOST_FACTORS = 1 << 16


def check_counts(path: Path) -> None:
    """Raise ValueError if a header announces more than the file can hold, or more values than any
    tokenizer has, before anything is read or allocated for it."""
    with open_ordinary(path) as file:
        size = os.fstat(file.fileno()).st_size
        magic, version = file.read(4), file.read(4)
        little = int.from_bytes(version, "little") in (2, 3)
        if magic != b"GGUF" or not (little or int.from_bytes(version, "big") in (2, 3)):
            return  # the reader says what is wrong
        values = 0

        def number(width: int) -> int:
            return int.from_bytes(file.read(width), "little" if little else "big")

        def need(count: int, width: int, what: str) -> None:
            nonlocal values
            left, values = size - file.tell(), values + (0 if what == TEXT else count)
            most = LONGEST_TEXT if what == TEXT else MOST_VALUES
            if count * width > left or (count if what == TEXT else values) > most:
                raise ValueError(
                    f"{path}: damaged GGUF file: {count} {what} announced, with {left} bytes left "
                    f"and at most {most} expected."
                )

        def skip(kind: int, depth: int = 0) -> None:
            if kind == STRING:
                length = number(8)
                need(length, 1, TEXT)
                file.seek(length, 1)
            elif kind == ARRAY and depth < DEEPEST:
                inner, count = number(4), number(8)
                need(count, SCALARS.get(inner, 8), "values")
                if inner in SCALARS:
                    file.seek(count * SCALARS[inner], 1)
                else:
                    for _ in range(count):
                        skip(inner, depth + 1)
            elif kind in SCALARS:
                file.seek(SCALARS[kind], 1)
            else:
                raise ValueError(f"{path}: damaged GGUF file: a value of the unknown type {kind}.")

        tensors, pairs = number(8), number(8)
        need(tensors, 24, "tensors")
        need(pairs, 13, "keys")
        for _ in range(pairs):
            skip(STRING)
            skip(number(4))
        for _ in range(tensors):
            skip(STRING)
            dims = number(4)
            need(dims, 8, "dimensions")
            file.seek(8 * dims + 12, 1)


def open_gguf(path: Path) -> Any:
    """Open a gguf.GGUFReader.

    Raises: ValueError where the package is missing or the file is damaged.
    """
    require("gguf", str(path))
    from gguf import GGUFReader

    check_counts(path)
    try:
        return GGUFReader(str(path), "r")
    except Exception as error:  # the reader may raise anything for a damaged header
        raise ValueError(f"{path}: damaged GGUF file: {type(error).__name__}: {error}") from error


def read_metadata(path: Path) -> Metadata:
    """Read what decides positions in a GGUF file.

    Raises: ValueError where the package is missing, or the file is damaged or lacks the keys.
    """
    reader = open_gguf(path)
    named = reader.fields.get("general.architecture")
    architecture = named.contents() if named is not None else None
    if not isinstance(architecture, str):
        raise ValueError(f"{path}: the GGUF file has no general.architecture.")
    values = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith(f"{architecture}.")
    }
    fields: dict[str, Any] = {}
    for name, key in KEYS.items():
        old = f"{architecture}.{OLD_KEYS.get(name, key)}"
        value = values.get(f"{architecture}.{key}", values.get(old))
        if value is not None:
            fields[name] = _checked(path, f"{architecture}.{key}", name, value)
    fields.setdefault("context_length", 0)
    if not fields["context_length"]:
        raise ValueError(f"{path}: the GGUF file has no {architecture}.context_length.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor_name in FACTORS.items():
        for found in (tensor_name, f"blk.0.{tensor_name}"):
            if found in tensors:
                if tensors[found].n_elements > MOST_FACTORS:
                    raise ValueError(f"{path}: {found} has more than {MOST_FACTORS} elements.")
                fields[name] = tuple(float(v) for v in tensors[found].data.ravel())
                if wrong := [v for v in fields[name] if not 0 < v < math.inf]:
                    raise ValueError(f"{path}: {found} must be numbers above 0, got {wrong[0]:g}.")
                break
    head_dim = _head_dim(values, architecture, path)
    layers = values.get(f"{architecture}.block_count", 0)
    if not isinstance(layers, int) or not 0 <= layers <= LARGEST_LAYERS:
        raise ValueError(
            f"{path}: {architecture}.block_count must be between 0 and {LARGEST_LAYERS}, got "
            f"{layers!r}."
        )
    given = frozenset(fields)
    fields.setdefault("dimension_count", head_dim)
    return Metadata(architecture, head_dim=head_dim, num_layers=layers, given=given, **fields)


def _checked(path: Path, key: str, name: str, value: Any) -> Any:
    """Return a value of the header. Raises: ValueError unless it is a word where one is wanted, and
    a finite number above 0 elsewhere."""
    if name == "scaling_type":
        right, wanted = isinstance(value, str), "a word"
    else:
        wanted = "a number above 0"
        right = isinstance(value, int | float) and math.isfinite(value)
        # 0 is for no window, and for a share or a multiplier that is switched off
        right = right and (value > 0 or (value == 0 and name in MAY_BE_ZERO))
    if not right:
        raise ValueError(f"{path}: {key} must be {wanted}, got {value!r}.")
    return int(value) if name in WHOLE else value


def _head_dim(values: dict[str, Any], architecture: str, path: Path) -> int:
    given = values.get(f"{architecture}.attention.key_length_mla")
    if given is None:
        given = values.get(f"{architecture}.attention.key_length")
    if given is None:
        hidden = values.get(f"{architecture}.embedding_length")
        heads = values.get(f"{architecture}.attention.head_count")
        heads = heads[0] if isinstance(heads, list) and heads else heads
        if type(hidden) is not int or type(heads) is not int or not 0 < heads <= hidden:
            raise ValueError(f"{path}: the GGUF file has neither key_length nor head counts.")
        given = hidden // heads
    if type(given) is not int or given < 1:
        raise ValueError(f"{path}: {architecture}'s key_length must be a number above 0.")
    return given
