"""An encoding beside the weights of the model that it is attached to: posenc.json says what it is,
posenc.safetensors holds its numbers."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from posenc.dialects.inside import inside
from posenc.dialects.json_object import read_json
from posenc.encoding.base import PositionEncoding
from posenc.encoding.per_layer import PerLayer
from posenc.hf.attachment.attach import ATTACHMENT, attach
from posenc.hf.attachment.hooks import ENCODING
from posenc.hf.attachment.written import name_of, rebuilt, written
from posenc.hf.checkpoint import files
from posenc.hf.checkpoint.loading import quiet_transformers
from posenc.report.atomic import write_atomically

RECORD, NUMBERS = "posenc.json", "posenc.safetensors"
FORMAT = 1
LOOKED_AT = 64
"""Numbers of each weight that tell one model from another."""


def save_beside(model: Any) -> None:
    """Have the model's save_pretrained write the encoding too, until it is detached."""
    own = {"save_pretrained": MethodType(_save, model)}
    getattr(model, ATTACHMENT).changed.append((model, own, {}))
    vars(model).update(own)


def load(
    folder: str | Path,
    *,
    encoding: PositionEncoding | None = None,
    decoder: PositionEncoding | None = None,
    **options: Any,
) -> Any:
    """The model of a folder, with the encoding that was attached when it was saved.

    Args:
        folder: what `model.save_pretrained` wrote.
        encoding, decoder: for encodings of one's own classes, which are never imported because a
            file names them: objects built as before. Their numbers come from the folder.
        options: of transformers' from_pretrained, such as dtype.

    Raises: ValueError where there is no posenc.json, it belongs to other weights, or the encoding
    is not what it says.
    """
    folder = Path(folder)
    if not (folder / RECORD).is_file():
        raise ValueError(
            f"{folder}: it has no {RECORD}: no encoding was attached when it was saved. "
            "Load it with transformers."
        )
    record = read_json(inside(folder, RECORD, "posenc.hf.load"))
    numbers = inside(folder, NUMBERS, RECORD)
    _check(folder, record, numbers)
    given = (encoding, decoder)
    encodings = [
        _encoding(folder / RECORD, stack, own)
        for stack, own in zip(record["stacks"], given, strict=False)
    ]
    transformers = quiet_transformers()
    raw = files.read_config(folder)
    files.refuse_code(folder, raw, transformers.CONFIG_MAPPING)
    kind = getattr(transformers, (raw.get("architectures") or [""])[0], None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"{folder / 'config.json'}: architectures names no class of transformers.")
    model = kind.from_pretrained(folder, trust_remote_code=False, **options)
    second = encodings[1] if len(encodings) > 1 else None
    attach(model, encodings[0], decoder=second, own=record["own"])
    _read_numbers(model, numbers)
    return model


def _save(
    self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None,
    push_to_hub: bool = False, **options: Any,
) -> None:  # fmt: skip
    """`save_pretrained`, and the encoding beside the weights."""
    if push_to_hub:
        raise ValueError(
            "posenc: save_pretrained(push_to_hub=True) would upload the weights without their "
            "encoding. Call model.push_to_hub, or upload the folder."
        )
    weights = self.state_dict() if state_dict is None else state_dict
    seen: set[int] = set()
    kept = {}
    for name, tensor in weights.items():  # what layers share is written once
        if f"{ENCODING}." in name:
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
        kept[name] = tensor
    type(self).save_pretrained(
        self, save_directory, is_main_process=is_main_process, state_dict=kept, **options
    )
    if is_main_process:
        write_encoding(self, Path(save_directory))


def write_encoding(model: Any, folder: Path) -> None:
    """posenc.json and posenc.safetensors, beside weights that are there already."""
    from safetensors.torch import save

    attachment = getattr(model, ATTACHMENT)
    encodings = [getattr(stack, ENCODING) for stack in attachment.stacks]
    tensors = {
        f"{i}.{name}": tensor.detach().cpu().contiguous().clone()
        for i, encoding in enumerate(encodings)
        for name, tensor in encoding.state_dict().items()
    }
    numbers = save(tensors)
    record = {
        "format": FORMAT,
        "model": type(model).__name__,
        "own": attachment.own,
        "stacks": [
            {"is": _classes(e), "says": _says(e), "encoding": written(e)} for e in encodings
        ],
        "weights": _fingerprint(folder),
        "numbers": hashlib.sha256(numbers).hexdigest(),
    }
    write_atomically(folder / NUMBERS, numbers)
    write_atomically(folder / RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _classes(encoding: nn.Module) -> list[str]:
    """Of an encoding and those in it; how many layers have a copy does not matter."""
    kinds = {
        name_of(m)
        for m in encoding.modules()
        if isinstance(m, PositionEncoding) and not isinstance(m, PerLayer)
    }
    return sorted(kinds)


def _says(encoding: nn.Module) -> str:
    return " ".join(str(encoding).split())


def _fingerprint(folder: Path) -> str:
    """The weights by their names, shapes and first numbers, as the files hold them."""
    from safetensors import safe_open

    found = hashlib.sha256()
    for path in files.weight_files(folder):
        with safe_open(path, framework="pt") as opened:
            for name in sorted(opened.keys()):
                part = opened.get_slice(name)
                shape = part.get_shape()
                found.update(f"{name} {part.get_dtype()} {shape}".encode())
                tensor: Tensor = part[:1] if shape else opened.get_tensor(name)
                first = tensor.flatten()[:LOOKED_AT].contiguous()
                found.update(first.view(torch.uint8).numpy().tobytes() if shape else b"")
    return found.hexdigest()


def _check(folder: Path, record: dict[str, Any], numbers: Path) -> None:
    """Raises: ValueError unless the record is whole and of these weights and numbers."""
    path = folder / RECORD
    wanted = {"format", "own", "stacks", "weights", "numbers"}
    if record.get("format") != FORMAT or not wanted <= set(record):
        raise ValueError(
            f"{path}: expected format {FORMAT} with {', '.join(sorted(wanted))}, got format "
            f"{record.get('format')!r}. Another version of posenc may have written it."
        )
    stacks = record["stacks"]
    if not isinstance(stacks, list) or len(stacks) not in (1, 2):
        raise ValueError(f"{path}: stacks must be a list of one encoding or two, got {stacks!r}.")
    if hashlib.sha256(numbers.read_bytes()).hexdigest() != record["numbers"]:
        raise ValueError(f"{path}: {NUMBERS} is not the file that was written with it.")
    if _fingerprint(folder) != record["weights"]:
        raise ValueError(
            f"{path}: the weights in the folder are not those that it was written with: another "
            "model's, or changed since. An encoding belongs to the weights it was trained with."
        )


def _encoding(path: Path, stack: Any, given: PositionEncoding | None) -> PositionEncoding:
    if not isinstance(stack, dict) or "encoding" not in stack:
        raise ValueError(f"{path}: each of stacks must be an object with an encoding.")
    if given is not None:
        if _classes(given) != stack.get("is"):
            raise ValueError(f"{path}: it holds {stack.get('is')}, got {_classes(given)}.")
        return given
    if stack["encoding"] is None:
        raise ValueError(
            f"{path}: {stack.get('is')} cannot be built from a file: it is not posenc's own, or "
            "an argument is more than numbers and names. Build it as before and hand it to "
            "posenc.hf.load(folder, encoding=...)."
        )
    try:
        found = rebuilt(stack["encoding"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if _says(found) != stack.get("says"):
        raise ValueError(
            f"{path}: this version of posenc builds {_says(found)} from it, and "
            f"{stack.get('says')} was saved."
        )
    return found


def _read_numbers(model: Any, numbers: Path) -> None:
    """Fill the encodings with what was saved. Raises: ValueError where names or shapes differ."""
    from safetensors.torch import load_file

    tensors = load_file(numbers)
    for index, stack in enumerate(getattr(model, ATTACHMENT).stacks):
        encoding: nn.Module = getattr(stack, ENCODING)
        own = {
            name.partition(".")[2]: tensor
            for name, tensor in tensors.items()
            if name.partition(".")[0] == str(index)
        }
        floats = {t.dtype for t in own.values() if t.is_floating_point()}
        if len(floats) == 1:
            encoding.to(floats.pop())
        try:
            encoding.load_state_dict(own)
        except RuntimeError as error:
            raise ValueError(f"{numbers}: it does not fit the encoding: {error}") from error
