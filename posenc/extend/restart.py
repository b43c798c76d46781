"""Keep finished work of killed runs. State is locked, and used only if it is complete and fits."""

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc.hf.checkpoint.text import Windows
from posenc.report.files.atomic import write_atomically
from posenc.report.files.lock import held
from posenc.report.files.opened import text_of
from posenc.report.files.record import seal, unseal
from posenc.report.page.visible import visible

LOG = logging.getLogger("posenc.extend")
"""Reports on stderr what starts again and why; applications may redirect it."""
PARTIALS = (".search.json.*.partial", "tune/.tune*.partial")
"""Files that a kill during a write leaves behind."""
Identity = dict[str, str]
"""Hashes, by name, of everything that a result depends on."""


def own_state(out: Path) -> Path:
    """Return the folder in which a restart without --state finds finished work. It is deleted after
    the export."""
    return out.parent / f".{out.name}.state"


@contextlib.contextmanager
def folder_locked(folder: Path) -> Iterator[None]:
    """Lock `folder` for this run. It is made if missing, and removed if empty afterwards. Partial
    files of killed runs are deleted. The lock ends with the process, even if killed.

    Raises: ValueError if another run has locked it.
    """
    busy = (
        f"Another posenc extend works in {folder}. Wait for it, or give another --state or --out."
    )
    with held(folder, busy):
        for partial in (path for pattern in PARTIALS for path in folder.glob(pattern)):
            partial.unlink(missing_ok=True)
        yield


def run_identity(model: nn.Module, windows: Windows, **settings: Any) -> Identity:
    """Hash everything that a search or a tuning depends on: the weights and config of the model as
    it is now, the text and the settings."""
    config: Any = model.config
    plain = {k: v for k, v in config.to_dict().items() if k not in _OF_THE_FOLDER}
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(repr((name, tensor.dtype, tensor.shape)).encode())
        weights.update(_bytes(tensor))
    text = hashlib.sha256(_bytes(windows.tokens))
    text.update(repr(windows.tokens.shape).encode())
    text.update(_bytes(windows.documents))
    return {
        "weights": weights.hexdigest(),
        "config": _hash(json.dumps(plain, sort_keys=True, default=str)),
        "text": text.hexdigest(),
        **{name: _hash(repr(value)) for name, value in settings.items()},
    }


_OF_THE_FOLDER = ("_name_or_path", "transformers_version")
"""Config keys that depend on the place and software of saving."""


def write_sealed(path: Path, whose: Identity, content: dict[str, Any]) -> None:
    """Write content with the identity of its run and a hash."""
    write_atomically(path, seal({"of": whose, "content": content}))


def read_sealed(path: Path, whose: Identity) -> dict[str, Any] | None:
    """Read what `write_sealed` wrote. Returns None if there is no file, or, with a warning, if it
    is damaged.

    Raises: ValueError where it belongs to something else.
    """
    if not path.exists():
        return None
    try:
        sealed = unseal(text_of(path))
        differs = [
            k for k in sorted({*whose, *sealed["of"]}) if sealed["of"].get(k) != whose.get(k)
        ]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        start_again(path, error)
        return None
    if differs:
        raise ValueError(
            f"{path} was made with other {', '.join(differs)}. Delete it, or give another --state."
        )
    return sealed["content"]


def start_again(path: Path, error: BaseException) -> None:
    """Say that a file cannot be used, and delete it."""
    LOG.warning("%s", visible(f"{path} is damaged ({error}): its work is done again."))
    path.unlink(missing_ok=True)


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash(text: str) -> str:
    return sha256(text.encode("utf-8"))


def _bytes(tensor: Tensor) -> Any:
    """Return the tensor's bytes as a buffer, without a copy."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
