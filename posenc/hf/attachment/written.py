"""Convert an encoding to plain JSON and back: its class and constructor arguments.

Only posenc's classes are built: importing a module that an untrusted file names would run its code.
"""

import importlib
import inspect
from dataclasses import fields, is_dataclass
from typing import Any

from posenc.encodings import PositionEncoding, path_of_class
from posenc.frequencies.scaling import Scaling

_POSENC_PREFIX = "posenc."
_JSON_SCALARS = (bool, int, float, str, type(None))


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
    found = _from_json(record)
    if not isinstance(found, PositionEncoding):
        raise ValueError(f"an encoding was expected, got {record!r}.")
    return found


def _to_json(value: Any) -> Any:
    """Convert a value to plain JSON; encodings and scalings become their class and arguments. Raise
    TypeError for what JSON cannot describe."""
    if isinstance(value, _JSON_SCALARS):
        return value
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    is_posencs = type(value).__module__.startswith(_POSENC_PREFIX)
    if is_posencs and isinstance(value, PositionEncoding):
        arguments = vars(value).get("_explicit_arguments", {})
    elif is_posencs and is_dataclass(value) and not isinstance(value, type):
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
    kind = _posenc_class(value.get("class"))
    written_arguments = value.get("arguments")
    if not isinstance(written_arguments, dict):
        raise ValueError(f"arguments must be an object, got {written_arguments!r}.")
    arguments = {name: _from_json(item) for name, item in written_arguments.items()}
    positional: tuple = ()
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            positional = arguments.pop(name, ())
        elif parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    try:
        return kind(*positional, **arguments)
    except TypeError as error:
        raise ValueError(f"{value['class']}: {error}") from error


def _posenc_class(path: Any) -> Any:
    """Return the class at `path`, which must be an encoding or scaling of posenc."""
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    kind = None
    if module.startswith(_POSENC_PREFIX) and name.isidentifier():
        try:
            kind = getattr(importlib.import_module(module), name, None)
        except ImportError:
            kind = None
    if not isinstance(kind, type) or not issubclass(kind, PositionEncoding | Scaling):
        raise ValueError(f"{path!r} is no encoding of posenc: other code is not run from a file.")
    return kind
