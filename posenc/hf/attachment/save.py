"""Save an encoding next to its model's weights: posenc.json describes it, posenc.safetensors has
its parameters."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc.dialects.files.attached import MARK, RECORD
from posenc.encodings import PerLayer, PositionEncoding, path_of_class, repr_in_one_line
from posenc.hf.attachment.calls import ATTACHMENT_ATTRIBUTE, ENCODING_MODULE
from posenc.hf.attachment.written import encoding_to_json
from posenc.hf.checkpoint import files
from posenc.report.files.atomic import write_atomically
from posenc.report.files.record import strict_json

PARAMETERS_FILE = "posenc.safetensors"
FORMAT = 2
HASHED_ELEMENTS = 64
"""Elements of each weight that are hashed to identify a model."""


def hook_save_pretrained(model: Any) -> None:
    """Make the model's save_pretrained write the encoding too, until it is detached."""
    replacement = {
        "save_pretrained": partial(_save_with_encoding, model)
    }  # which pickles, unlike a bound function
    getattr(model, ATTACHMENT_ATTRIBUTE).changed.append((model, replacement, {}))
    vars(model).update(replacement)


def _save_with_encoding(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    **options: Any,
) -> None:
    """Save the model, and the encoding next to its weights: the model's `save_pretrained` while an
    encoding is attached, with its arguments.

    The weights get a mark, MARK, by which posenc refuses to load them without the encoding.
    """
    if push_to_hub:
        raise ValueError(
            "posenc: save_pretrained(push_to_hub=True) would upload the weights without their "
            "encoding. Call model.push_to_hub, or upload the folder."
        )
    weights = self.state_dict() if state_dict is None else state_dict
    seen: set[int] = set()
    kept = {}
    for name, tensor in weights.items():  # parameters that layers share are written once
        if f"{ENCODING_MODULE}." in name:
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
        kept[name] = tensor
    kept[MARK] = torch.ones(1)
    type(self).save_pretrained(
        self, save_directory, is_main_process=is_main_process, state_dict=kept, **options
    )
    if is_main_process:
        write_encoding(self, Path(save_directory))


def write_encoding(model: Any, folder: Path) -> None:
    """Write posenc.json and posenc.safetensors next to the saved weights of a model."""
    from safetensors.torch import save

    attachment = getattr(model, ATTACHMENT_ATTRIBUTE)
    encodings = [getattr(stack, ENCODING_MODULE) for stack in attachment.stacks]
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
            {
                "is": encoding_classes(encoding),
                "says": repr_in_one_line(encoding),
                "encoding": encoding_to_json(encoding),
                "shared": shared_parameter_names(encoding),
            }
            for encoding in encodings
        ],
        "weights": weights_fingerprint(folder),
        "numbers": hashlib.sha256(numbers).hexdigest(),
    }
    write_atomically(folder / PARAMETERS_FILE, numbers)
    write_atomically(folder / RECORD, strict_json(record, indent=2, ensure_ascii=False) + "\n")


def encoding_classes(encoding: nn.Module) -> list[str]:
    """Return "module:Class" of an encoding and of all encodings inside it, each once."""
    kinds = {
        path_of_class(type(m))
        for m in encoding.modules()
        if isinstance(m, PositionEncoding) and not isinstance(m, PerLayer)
    }
    return sorted(kinds)


def shared_parameter_names(encoding: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several, as that of DeBERTa's table, which all
    layers read."""
    names: dict[int, list[str]] = {}
    for name, parameter in encoding.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [of_one for of_one in names.values() if len(of_one) > 1]


def share_parameters(encoding: nn.Module, groups: list[list[str]]) -> None:
    """Make the parameters of each group one again, see `shared_parameter_names`.

    Raises: ValueError for a name that is no parameter, and for other shapes.
    """
    for first, *others in groups:
        try:
            parameter = encoding.get_parameter(first)
            for name in others:
                module, _, attribute = name.rpartition(".")
                if encoding.get_parameter(name).shape != parameter.shape:
                    raise ValueError(f"{first} and {name} have other shapes, and were one.")
                setattr(encoding.get_submodule(module), attribute, parameter)
        except AttributeError as error:
            raise ValueError(f"{', '.join([first, *others])} were one parameter: {error}") from None


def weights_fingerprint(folder: Path) -> str:
    """Return a hash of the weights in a folder: of their names, dtypes, shapes and first elements,
    because hashing all elements would read the whole file. Scalars count without their value."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for path in files.weight_files(folder):
        with safe_open(path, framework="pt") as opened:
            for name in sorted(opened.keys()):
                part = opened.get_slice(name)
                shape = part.get_shape()
                digest.update(f"{name} {part.get_dtype()} {shape}".encode())
                tensor: Tensor = part[:1] if shape else opened.get_tensor(name)
                first = tensor.flatten()[:HASHED_ELEMENTS].contiguous()
                digest.update(first.view(torch.uint8).numpy().tobytes() if shape else b"")
    return digest.hexdigest()
