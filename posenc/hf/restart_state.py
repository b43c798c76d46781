"""Keep finished work of killed runs, in a folder that is locked for one of them: it is used only if
it is complete and belongs to the run."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc.files.atomic import write_atomically
from posenc.files.folders import locked_without_file
from posenc.files.opening import read_file_text
from posenc.files.sealed_json import seal, unseal
from posenc.hf.checkpoint.tokenization import Windows
from posenc.report.escaping import show_hidden_characters

LOG = logging.getLogger("posenc.hf")
"""Reports on stderr what starts again and why; applications may redirect it."""
Identity = dict[str, str]
"""Hashes, by name, of everything that a result depends on."""
PARTIAL_FILE_PATTERNS = (".search.json.*.partial", "tune/.tune*.partial")
"""Files that a kill during a write leaves behind."""


def default_state_folder(out: Path) -> Path:
    """Return the folder next to `out` in which search and tuning save their work for restarts,
    unless --state names another. It is deleted after the export."""
    return out.parent / f".{out.name}.state"


@contextlib.contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this run. It is made if missing, and removed if empty afterwards. Partial
    files of killed runs are deleted. The lock ends with the process, even if killed.

    Raises: ValueError if another run has locked it.
    """
    busy_message = (
        f"Another posenc extend works in {folder}. Wait for it, or give another --state or --out."
    )
    with locked_without_file(folder, busy_message):
        for partial_file in (
            path for pattern in PARTIAL_FILE_PATTERNS for path in folder.glob(pattern)
        ):
            partial_file.unlink(missing_ok=True)
        yield


def identity_of_run(model: nn.Module, windows: Windows, **settings: Any) -> Identity:
    """Return hashes of everything that a search or a tuning depends on: the present weights and
    config of the model, the text and the settings."""
    config: Any = model.config
    config_values = {k: v for k, v in config.to_dict().items() if k not in _KEYS_ABOUT_SAVING}
    weights_hash = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights_hash.update(repr((name, tensor.dtype, tensor.shape)).encode())
        weights_hash.update(_tensor_bytes(tensor))
    text_hash = hashlib.sha256(_tensor_bytes(windows.tokens))
    text_hash.update(repr(windows.tokens.shape).encode())
    text_hash.update(_tensor_bytes(windows.document_of_token))
    return {
        "weights": weights_hash.hexdigest(),
        "config": _sha256_of_text(json.dumps(config_values, sort_keys=True, default=str)),
        "text": text_hash.hexdigest(),
        **{name: _sha256_of_text(repr(value)) for name, value in settings.items()},
    }


_KEYS_ABOUT_SAVING = ("_name_or_path", "transformers_version")
"""Config keys that depend on the place and software of saving."""


def write_sealed(path: Path, identity: Identity, content: dict[str, Any]) -> None:
    """Write content as JSON, with the identity of its run and a hash that shows damage."""
    write_atomically(path, seal({"of": identity, "content": content}))


def read_sealed(path: Path, identity: Identity) -> dict[str, Any] | None:
    """Return the content that `write_sealed` wrote. Returns None if there is no file, or, with a
    warning, if it is damaged.

    Raises: ValueError if it was written for another identity.
    """
    if not path.exists():
        return None
    try:
        sealed_content = unseal(read_file_text(path))
        differing_keys = [
            k
            for k in sorted({*identity, *sealed_content["of"]})
            if sealed_content["of"].get(k) != identity.get(k)
        ]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        discard_damaged_state(path, error)
        return None
    if differing_keys:
        raise ValueError(
            f"{path} was made with other {', '.join(differing_keys)}. Delete it, or give another "
            "--state."
        )
    return sealed_content["content"]


def discard_damaged_state(path: Path, error: BaseException) -> None:
    """Warn that a saved file cannot be used because of `error`, and delete it."""
    LOG.warning(
        "%s", show_hidden_characters(f"{path} is damaged ({error}): its work is done again.")
    )
    path.unlink(missing_ok=True)


def sha256(content: bytes) -> str:
    """Return the SHA-256 hash in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _sha256_of_text(text: str) -> str:
    """Return the SHA-256 hash of the text in UTF-8."""
    return sha256(text.encode("utf-8"))


def _tensor_bytes(tensor: Tensor) -> Any:
    """Return the tensor's bytes as a buffer, without a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
