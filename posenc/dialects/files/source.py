"""Load position settings from a config.json, a folder, params.json of Meta or Mistral,
DeepSeek's inference config, or GGUF."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posenc.dialects.families import WITHOUT_ROTATION
from posenc.dialects.files.gguf_metadata import Metadata
from posenc.dialects.files.inside import inside
from posenc.dialects.files.json_object import read_json
from posenc.dialects.files.spelling import as_transformers, name_of_spelling
from posenc.dialects.meaning import naming
from posenc.dialects.model import flatten
from posenc.report.files.opened import open_ordinary

NAMES = ("config.json", "params.json")
ADAPTER_CONFIG = "adapter_config.json"


class NoRotationError(ValueError):
    """The config of a model that rotates nothing."""


@dataclass(frozen=True)
class Source:
    """What was read.

    config: the settings under transformers' keys; empty for GGUF. spelling: whose keys the file
    uses. folder: its location. raw: the file's own dict.
    """

    path: Path
    spelling: str
    config: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent


def is_adapter(path: Path) -> bool:
    """Return True for a folder of LoRA adapters without a model's config."""
    return (path / ADAPTER_CONFIG).is_file() and not (path / NAMES[0]).is_file()


def load(path: Path) -> Source:
    """Read a file, or the config in a folder.

    Raises: ValueError for what is no such file; OSError where it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        named = next((name for name in NAMES if os.path.lexists(path / name)), None)
        found = None if named is None else inside(path, named, "its listing")
        if found is None:
            ggufs = sorted(path.glob("*.gguf"))
            if len(ggufs) != 1:
                raise ValueError(
                    f"{path}: expected {' or '.join(NAMES)} or one .gguf file, found "
                    f"{len(ggufs)} .gguf files."
                )
            found = inside(path, ggufs[0].name, "its listing")
        path = found
    if not path.exists():
        raise ValueError(f"{path}: no such file.")
    with open_ordinary(path) as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        from posenc.dialects.files.gguf_reader import read_metadata

        return Source(path, "gguf", metadata=read_metadata(path))
    raw = read_json(path)
    name = flatten(raw).get("model_type")
    attention = raw.get("attn_config")  # vendors' own code may rotate: Jina's, MosaicML's
    rotates = isinstance(attention, dict) and attention.get("rope") is True
    rotates = rotates or raw.get("position_embedding_type") in ("rotary", "rope")
    if isinstance(name, str) and name in WITHOUT_ROTATION and not rotates:
        raise NoRotationError(f"{path}: {name} has no rotary positions; there is nothing to read.")
    with naming(path):
        return Source(path, name_of_spelling(raw), as_transformers(raw), raw)
