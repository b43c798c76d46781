"""Save an encoding next to its model's weights: posenc.json describes it, posenc.safetensors has
its parameters."""

import hashlib
import importlib
import inspect
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from posenc.encodings import PerLayer, PositionEncoding, path_of_class, repr_in_one_line
from posenc.files.atomic import write_atomically
from posenc.files.sealed_json import strict_json
from posenc.frequencies.scalings.scaling import Scaling
from posenc.hf.attachment.forward_context import ATTACHMENT_ATTRIBUTE, ENCODING_MODULE
from posenc.hf.checkpoint import files
from posenc.runtimes.files.model_folder import ENCODING_FILE, MARKING_TENSOR

_POSENC_PREFIX = "posenc."
_JSON_SCALAR_TYPES = (bool, int, float, str, type(None))


def encoding_to_json(encoding: PositionEncoding) -> dict[str, Any] | None:
    """Return {"class": "module:Class", "arguments": {...}}. Return None if JSON cannot describe the
    class or an argument (a tensor, a custom mask).

    >>> from posenc import ALiBi
    >>> encoding_to_json(ALiBi(num_heads=4))
    {'class': 'posenc.encodings.scores.alibi:ALiBi', 'arguments': {'num_heads': 4}}
    """
    try:
        return _to_json(encoding)
    except TypeError:
        return None


def encoding_from_json(record: Any) -> PositionEncoding:
    """Build the encoding that `encoding_to_json` described, with fresh parameters.

    Raises: ValueError for an invalid record, or a class that is not posenc's.
    """
    encoding = _from_json(record)
    if not isinstance(encoding, PositionEncoding):
        raise ValueError(f"an encoding was expected, got {record!r}.")
    return encoding


def _to_json(value: Any) -> Any:
    """Convert a value to plain JSON; encodings and scalings become their class and arguments. Raise
    TypeError for what JSON cannot describe."""
    if isinstance(value, _JSON_SCALAR_TYPES):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    is_from_posenc = type(value).__module__.startswith(_POSENC_PREFIX)
    if is_from_posenc and isinstance(value, PositionEncoding):
        arguments = vars(value).get("_explicit_arguments", {})
    elif is_from_posenc and is_dataclass(value) and not isinstance(value, type):
        arguments = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    else:
        raise TypeError(f"{type(value).__name__} cannot be written")
    return {
        "class": path_of_class(type(value)),
        "arguments": {name: _to_json(item) for name, item in arguments.items()},
    }


def _from_json(value: Any) -> Any:
    """Build the value that `_to_json` converted; lists come back as tuples, as constructors take
    them."""
    if isinstance(value, list):
        return tuple(_from_json(item) for item in value)
    if not isinstance(value, dict):
        return value
    constructor = _posenc_class(value.get("class"))
    written_arguments = value.get("arguments")
    if not isinstance(written_arguments, dict):
        raise ValueError(f"arguments must be an object, got {written_arguments!r}.")
    arguments = {name: _from_json(item) for name, item in written_arguments.items()}
    positional_arguments: tuple = ()
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional_arguments = arguments.pop(name, ())
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    try:
        return constructor(*positional_arguments, **arguments)
    except TypeError as error:
        raise ValueError(f"{value['class']}: {error}") from error


def _posenc_class(path: Any) -> Any:
    """Return the class at `path`, which must be an encoding or scaling of posenc."""
    module_name, _, class_name = path.partition(":") if isinstance(path, str) else ("", "", "")
    loaded_class = None
    if module_name.startswith(_POSENC_PREFIX) and class_name.isidentifier():
        try:
            loaded_class = getattr(importlib.import_module(module_name), class_name, None)
        except ImportError:
            loaded_class = None
    if not isinstance(loaded_class, type) or not issubclass(
        loaded_class, PositionEncoding | Scaling
    ):
        raise ValueError(f"{path!r} is no encoding of posenc: other code is not run from a file.")
    return loaded_class


PARAMETERS_FILE = "posenc.safetensors"
FORMAT_VERSION = 3
"""Version of the keys of posenc.json; others are refused."""
HASHED_ELEMENTS_PER_WEIGHT = 64
"""Elements of each weight that are hashed to identify a model."""


def hook_save_pretrained(model: Any) -> None:
    """Make the model's save_pretrained write the encoding too, until it is detached."""
    replacement = {
        "save_pretrained": partial(_save_with_encoding, model)
    }  # which pickles, unlike a bound function
    getattr(model, ATTACHMENT_ATTRIBUTE).changed_attributes.append((model, replacement, {}))
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
    written_pointers: set[int] = set()
    saved_weights = {}
    for name, tensor in weights.items():  # parameters that layers share are written once
        if f"{ENCODING_MODULE}." in name:
            if tensor.data_ptr() in written_pointers:
                continue
            written_pointers.add(tensor.data_ptr())
        saved_weights[name] = tensor
    saved_weights[MARKING_TENSOR] = torch.ones(1)
    type(self).save_pretrained(
        self, save_directory, is_main_process=is_main_process, state_dict=saved_weights, **options
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
    parameter_bytes = save(tensors)
    record = {
        "format": FORMAT_VERSION,
        "model": type(model).__name__,
        "model_positions": attachment.model_positions,
        "stacks": [
            {
                "classes": encoding_classes(encoding),
                "repr": repr_in_one_line(encoding),
                "encoding": encoding_to_json(encoding),
                "shared_parameters": shared_parameter_names(encoding),
            }
            for encoding in encodings
        ],
        "weights_fingerprint": weights_fingerprint(folder),
        "parameters_sha256": hashlib.sha256(parameter_bytes).hexdigest(),
    }
    write_atomically(folder / PARAMETERS_FILE, parameter_bytes)
    write_atomically(
        folder / ENCODING_FILE, strict_json(record, indent=2, ensure_ascii=False) + "\n"
    )


def encoding_classes(encoding: nn.Module) -> list[str]:
    """Return "module:Class" of an encoding and of all encodings inside it, each once."""
    class_paths = {
        path_of_class(type(m))
        for m in encoding.modules()
        if isinstance(m, PositionEncoding) and not isinstance(m, PerLayer)
    }
    return sorted(class_paths)


def shared_parameter_names(encoding: nn.Module) -> list[list[str]]:
    """Return a list of names for each parameter that has several names, as that of DeBERTa's table,
    which all layers read."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in encoding.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return [names_of_one for names_of_one in names_by_id.values() if len(names_of_one) > 1]


def share_parameters(encoding: nn.Module, groups: list[list[str]]) -> None:
    """Let the names of each group share one parameter, see `shared_parameter_names`.

    Raises: ValueError for a name that is no parameter, and for other shapes.
    """
    for first_name, *other_names in groups:
        try:
            parameter = encoding.get_parameter(first_name)
            for name in other_names:
                module_path, _, attribute = name.rpartition(".")
                if encoding.get_parameter(name).shape != parameter.shape:
                    raise ValueError(f"{first_name} and {name} have other shapes, and were one.")
                setattr(encoding.get_submodule(module_path), attribute, parameter)
        except AttributeError as error:
            raise ValueError(
                f"{', '.join([first_name, *other_names])} were one parameter: {error}"
            ) from None


def weights_fingerprint(folder: Path) -> str:
    """Return a hash of the weights in a folder: of their names, dtypes, shapes and first elements,
    because hashing all elements would read the whole file. Scalars count without their value."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for path in files.weight_files(folder):
        with safe_open(path, framework="pt") as weights_file:
            for name in sorted(weights_file.keys()):
                tensor_slice = weights_file.get_slice(name)
                shape = tensor_slice.get_shape()
                digest.update(f"{name} {tensor_slice.get_dtype()} {shape}".encode())
                tensor: Tensor = tensor_slice[:1] if shape else weights_file.get_tensor(name)
                first_elements = tensor.flatten()[:HASHED_ELEMENTS_PER_WEIGHT].contiguous()
                digest.update(first_elements.view(torch.uint8).numpy().tobytes() if shape else b"")
    return digest.hexdigest()
