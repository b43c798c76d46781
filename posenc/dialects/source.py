"""A checkpoint's position settings as a file gives them: a config.json, a folder, params.json of
Meta or Mistral, DeepSeek's own inference config, or GGUF."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posenc.dialects.families import WITHOUT_ROTATION
from posenc.dialects.gguf_metadata import Metadata
from posenc.dialects.model import flatten
from posenc.dialects.spelling import as_transformers, name_of_spelling

LARGEST_JSON = 8 << 20
"""Bytes; a config of a few kilobytes is usual, one of factor lists has tens."""
NAMES = ("config.json", "params.json")


class NoRotationError(ValueError):
    """The config of a model that rotates nothing."""


@dataclass(frozen=True)
class Source:
    """What was read.

    config: the settings in transformers' words; empty for GGUF. spelling: whose words the file
    used. folder: where it lies. raw: the file's own dict.
    """

    path: Path
    spelling: str
    config: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent


def load(path: Path) -> Source:
    """Read a file, or the config in a folder.

    Raises: ValueError for what is no such file; OSError where it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in NAMES if (path / name).is_file()), None)
        if found is None:
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) != 1:
                raise ValueError(
                    f"{path}: expected {' or '.join(NAMES)} or one .gguf file, found "
                    f"{len(ggufs)} .gguf files."
                )
            found = ggufs[0]
        path = found
    if not path.exists():
        raise ValueError(f"{path}: no such file.")
    require_ordinary(path)
    with path.open("rb") as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        from posenc.dialects.gguf_reader import read_metadata

        return Source(path, "gguf", metadata=read_metadata(path))
    raw = read_json(path)
    name = flatten(raw).get("model_type")
    if isinstance(name, str) and name in WITHOUT_ROTATION:
        raise NoRotationError(f"{path}: {name} has no rotary positions; there is nothing to read.")
    return Source(path, name_of_spelling(raw), as_transformers(raw), raw)


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object.

    Raises: ValueError where it is too large, no UTF-8, no JSON, no object, holds NaN or infinity,
    or gives one key twice with two values.
    """
    require_ordinary(path)
    size = path.stat().st_size
    if size > LARGEST_JSON:
        raise ValueError(f"{path}: {size} bytes, expected a config of at most {LARGEST_JSON}.")
    try:
        value = json.loads(
            path.read_bytes().decode("utf-8-sig"),
            object_pairs_hook=_one_value_each,
            parse_constant=_refuse_constant,
        )
    except (json.JSONDecodeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: expected JSON, {error}.") from error
    except RecursionError as error:
        raise ValueError(f"{path}: expected a config, got JSON nested too deeply.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected one JSON object, got {type(value).__name__}.")
    return value


def require_ordinary(path: Path) -> None:
    """Raise ValueError for a pipe, which would be waited for, and a device, which has no end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not an ordinary file, but a pipe, a device or a folder.")


def _one_value_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise ValueError(f"the key {key!r} is given twice, with two values")
        result[key] = value
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that a config may have")
