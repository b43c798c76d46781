"""Read a JSON file that contains one object."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from posenc.files.opening import read_file_bytes
from posenc.files.sealed_json import parse_bounded_json

MOST_BYTES_OF_CONFIG = 8 << 20
"""Bytes. Configs usually have a few kilobytes, those with factor lists tens."""
MOST_BYTES_OF_INDEX = 256 << 20
"""An index names every tensor; that of the largest models has 9 MB."""
NAMES_OF_TYPES = {list: "a list", str: "a string", type(None): "null"}


def read_json(path: Path, max_bytes: int = MOST_BYTES_OF_CONFIG) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises: ValueError naming the file where it is not ordinary, has more than `max_bytes` bytes, is
    no UTF-8, no JSON, no object, gives one key twice with two values, or has a number beyond 1e308.
    """
    content = read_file_bytes(path, max_bytes)
    try:
        text = content.decode("utf-8-sig")
        value = parse_bounded_json(
            text, object_pairs_hook=_object_without_contradictions, parse_float=_finite_float
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}).") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error
    if not isinstance(value, dict):
        type_name = NAMES_OF_TYPES.get(type(value), repr(value))
        raise ValueError(f"{path}: expected a JSON object, got {type_name}.")
    return value


def in_json_words(value: Any) -> str:
    """Return a value of a config for a message: as Python writes it, with text in single quotes,
    but with JSON's words null, true and false.

    >>> in_json_words({"factor": None, "types": ["yarn", True]})
    "{'factor': null, 'types': ['yarn', true]}"
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(in_json_words(item) for item in value)}]"
    if isinstance(value, Mapping):
        items_in_words = (
            f"{in_json_words(key)}: {in_json_words(item)}" for key, item in value.items()
        )
        return f"{{{', '.join(items_in_words)}}}"
    return repr(value)


def require_strict_json(path: Path) -> None:
    """Raise ValueError, naming the file, unless it is JSON that strict readers accept: without NaN
    and infinities, which Python reads and JSON lacks."""
    content = read_file_bytes(path, MOST_BYTES_OF_INDEX)
    try:
        parse_bounded_json(content.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}).") from error


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN, Infinity or -Infinity."""
    raise ValueError(
        f"it has {name}, which JSON has no word for; give a number there, or delete the key"
    )


def _finite_float(digits: str) -> float:
    """Return the number. Raises: ValueError for one that is too large for a float."""
    if math.isinf(number := float(digits)):
        raise ValueError(f"expected a finite number, got {digits:.20}")
    return number


def _object_without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object's keys and values.

    Raises: ValueError for a key that is given twice, with two values.
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result and result[key] != value:
            raise ValueError(f"the key {key!r} is given twice, with two values")
        result[key] = value
    return result
