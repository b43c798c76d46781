"""Load position settings from a config.json, a folder, params.json of Meta or Mistral,
DeepSeek's inference config, a draft model's config, or GGUF."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posenc.files.opening import open_ordinary
from posenc.runtimes.config_model import with_language_model_keys_at_top
from posenc.runtimes.families import rotates_nothing
from posenc.runtimes.files.gguf_metadata import Metadata
from posenc.runtimes.files.json_object import read_json
from posenc.runtimes.files.model_folder import path_inside
from posenc.runtimes.files.spelling import as_transformers, name_of_spelling
from posenc.runtimes.meaning import path_in_errors

CONFIG_FILES = ("config.json", "params.json")
ADAPTER_CONFIG_FILE = "adapter_config.json"


class NoRotationError(ValueError):
    """A file says that its model rotates nothing, or has no weights to rotate by."""


@dataclass(frozen=True)
class Source:
    """A file with position settings, as it was read.

    config: the settings under transformers' keys; empty for GGUF. spelling: whose keys the file
    uses, such as "transformers" or "gguf". raw: the file's own dict. metadata: of a GGUF file.
    """

    path: Path
    spelling: str
    config: dict[str, Any] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    metadata: Metadata | None = None

    @property
    def folder(self) -> Path:
        """Return the folder that the file is in."""
        return self.path.parent


def is_adapter(path: Path) -> bool:
    """Return True for a folder of LoRA adapters without a model's config."""
    return (path / ADAPTER_CONFIG_FILE).is_file() and not (path / CONFIG_FILES[0]).is_file()


def load(path: Path) -> Source:
    """Read a config.json, a params.json or a GGUF file, or the one of them in a folder.

    Raises: NoRotationError for a model that rotates nothing; ValueError where there is no such
    file, or it is damaged; OSError where it cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        path = _config_path_in_folder(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file.")
    with open_ordinary(path) as file:
        is_gguf = file.read(4) == b"GGUF"
    if is_gguf or path.suffix == ".gguf":
        return Source(path, "gguf", metadata=_read_metadata(path))
    file_content = read_json(path)
    model_type = with_language_model_keys_at_top(file_content).get("model_type")
    if rotates_nothing(model_type, file_content):
        raise NoRotationError(
            f"{path}: {model_type} has no rotary positions; there is nothing to judge."
        )
    with path_in_errors(path):
        return Source(
            path, name_of_spelling(file_content), as_transformers(file_content), file_content
        )


def _read_metadata(path: Path) -> Metadata:
    """Return the settings of a GGUF file. Raises: NoRotationError for one without weights."""
    from posenc.runtimes.files.gguf_metadata import read_metadata

    metadata = read_metadata(path)
    if not metadata.has_weights:
        raise NoRotationError(
            f"{path}: the GGUF file has no tensors, as a vocabulary alone has none; there is "
            "nothing to judge."
        )
    return metadata


def _config_path_in_folder(folder: Path) -> Path:
    """Return the config in a folder, else its one GGUF file.

    Raises: ValueError where there is neither, or it is a link out of the folder.
    """
    for name in CONFIG_FILES:
        if os.path.lexists(folder / name):
            return path_inside(folder, name, "its listing")
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) != 1:
        raise ValueError(
            f"{folder}: expected {' or '.join(CONFIG_FILES)} or one .gguf file, found "
            f"{len(ggufs)} .gguf files."
        )
    return path_inside(folder, ggufs[0].name, "its listing")
