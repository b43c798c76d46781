"""The keys and factor tensors of a GGUF file, through the `gguf` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posenc.dialects.files.gguf_metadata import KEYS, Metadata

FACTORS = {
    "rope_freqs": "rope_freqs.weight",
    "factors_long": "rope_factors_long.weight",
    "factors_short": "rope_factors_short.weight",
}
WHOLE = ("context_length", "dimension_count", "dimension_count_swa", "sliding_window")


def open_gguf(path: Path) -> Any:
    """Open a gguf.GGUFReader.

    Raises: ValueError where the package is missing or the file is damaged.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            f"{path}: reading GGUF needs the gguf package; pip install posenc[doctor]."
        ) from error
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
        value = values.get(f"{architecture}.{key}")
        if value is not None:
            fields[name] = int(value) if name in WHOLE else value
    fields.setdefault("context_length", 0)
    if not fields["context_length"]:
        raise ValueError(f"{path}: the GGUF file has no {architecture}.context_length.")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for name, tensor_name in FACTORS.items():
        for found in (tensor_name, f"blk.0.{tensor_name}"):
            if found in tensors:
                fields[name] = tuple(float(v) for v in tensors[found].data.ravel())
                break
    head_dim = _head_dim(values, architecture, path)
    given = frozenset(fields)
    fields.setdefault("dimension_count", head_dim)
    return Metadata(
        architecture,
        head_dim=head_dim,
        num_layers=int(values.get(f"{architecture}.block_count", 0)),
        given=given,
        **fields,
    )


def _head_dim(values: dict[str, Any], architecture: str, path: Path) -> int:
    given = values.get(f"{architecture}.attention.key_length_mla")
    if given is None:
        given = values.get(f"{architecture}.attention.key_length")
    if given is None:
        hidden = values.get(f"{architecture}.embedding_length")
        heads = values.get(f"{architecture}.attention.head_count")
        heads = heads[0] if isinstance(heads, list) else heads
        if not hidden or not heads:
            raise ValueError(f"{path}: the GGUF file has neither key_length nor head counts.")
        given = hidden // heads
    return int(given)
