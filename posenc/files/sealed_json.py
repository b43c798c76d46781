"""Files that a later run reads: dataclasses as JSON with a hash that detects damage."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, NoReturn, Self

from posenc.files.opening import LARGEST_TEXT_BYTES, read_file_text

HASH_KEY = "sha256"
"""Key of the hash of all other fields."""
MAX_DEPTH, MAX_DIGITS = 64, 300
"""Bounds of nesting and of the digits of a whole number, in JSON that another program may have
written: chosen. A number of 300 digits still fits into a float."""
LARGEST_NUMBER = 1e60
"""Bound of a number, so that statistics of its square do not overflow."""
MAX_LETTERS, MAX_ITEMS = 100_000, 100_000
"""Bounds of a text and of a list."""
LARGEST_COUNT = 1 << 53
"""Bound of a whole number that counts something, which float64 still holds exactly."""
_LONGEST_NAME_SHOWN = 60
"""Letters of a key that a message shows; a damaged file may have keys of any length."""


def seal(content: dict[str, Any]) -> str:
    """Return `content` as JSON with its hash. Its values may be dataclasses, and hold some.

    >>> unseal(seal({"loss": 0.5}))
    {'loss': 0.5}

    Lone surrogates, which UTF-8 lacks, become question marks.
    Raises: ValueError for NaN or an infinity, which JSON lacks.
    """
    assert HASH_KEY not in content
    # Hash what will be read: a tuple comes back as a list, a lone surrogate as a question mark.
    content = {_as_read_back(key): value for key, value in content.items()}
    content_hash = _hash_of_content(content, _as_read_back)
    return "".join(_json_by_lines({HASH_KEY: content_hash, **content}))


def _json_by_lines(content: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of content as JSON: a line for each key, and one for each item of a list of
    objects. Python's own indentation is many times slower, and gives each number a line."""
    yield "{"
    for key_number, (key, value) in enumerate(content.items()):
        yield f"{',' if key_number else ''}\n {_compact_json(key)}: "
        is_list_of_objects = isinstance(value, list | tuple) and any(
            isinstance(item, dict) or dataclasses.is_dataclass(item) for item in value
        )
        if not is_list_of_objects:
            yield _compact_json(value)
            continue
        for item_number, item in enumerate(value):
            yield f"{',' if item_number else '['}\n  {_compact_json(item)}"
        yield "\n ]"
    yield "\n}"


def _compact_json(value: Any) -> str:
    """Return a value as JSON on one line, dataclasses as objects. Raises: ValueError for NaN or an
    infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_fields_of)


def _as_read_back(value: Any) -> Any:
    """Return a value as it is read from its JSON in a file."""
    return json.loads(_compact_json(value).encode(errors="replace"))


def _fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for `json`. Raises: TypeError for other values."""
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"{type(value).__name__} is not what JSON can hold")
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def unseal(text: str) -> dict[str, Any]:
    """Return the dict that `seal` was given. Raise ValueError if its content has changed since, if
    it has no hash, or if the text is no JSON object."""
    return _without_hash(parse_object(text))


def _without_hash(content: dict[str, Any]) -> dict[str, Any]:
    """Return sealed content without its hash. Raise ValueError if it has none, or another one than
    the content."""
    sealed_hash = content.pop(HASH_KEY, None)
    if sealed_hash is None:
        raise ValueError(f"it has no {HASH_KEY}")
    if sealed_hash != _hash_of_content(content):
        raise ValueError("it is not what was written: its hash differs")
    return content


def strict_json(value: Any, **options: Any) -> str:
    """Return a value as JSON, with the options of json.dumps.

    >>> strict_json({"limits": [0.0, 1.5]})
    '{"limits": [0.0, 1.5]}'

    Raises: ValueError naming the place of NaN or an infinity, which JSON lacks.
    """
    for place, number in _numbers_not_finite(value, ""):
        raise ValueError(f"{place or 'the number'} is {number}, which JSON has no word for")
    return json.dumps(value, allow_nan=False, **options)


def _numbers_not_finite(value: Any, place: str) -> Iterator[tuple[str, float]]:
    """Yield each number in a JSON value that is NaN or infinite, after its place: `limits[1]`.

    place: place of the value itself; "" for the whole.
    """
    if isinstance(value, float) and not math.isfinite(value):
        yield place, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers_not_finite(inner, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _numbers_not_finite(inner, f"{place}[{index}]")


def parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object as a dict. Raise ValueError for other JSON, for text that is no JSON,
    for the words NaN and Infinity, and as `parse_bounded_json`."""
    content = parse_bounded_json(text, parse_constant=_refuse_constant)
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, got {type(content).__name__}")
    return content


def parse_bounded_json(text: str, **hooks: Any) -> Any:
    """Return parsed JSON: values nested at most MAX_DEPTH deep, and whole numbers of at most
    MAX_DIGITS digits, which fit into a float.

    hooks: further arguments of json.loads.
    Raises: ValueError for text that is no JSON or beyond these bounds.
    """
    try:
        content = json.loads(text, parse_int=_parse_whole_number, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    containers = [content] if isinstance(content, dict | list) else []
    for _ in range(MAX_DEPTH):
        containers = _containers_in(containers)
        if not containers:
            return content
    raise ValueError(f"it is nested more than {MAX_DEPTH} times")


def _containers_in(containers: list[Any]) -> list[Any]:
    """Return the dicts and lists that are items of these dicts and lists."""
    inner_containers = []
    for container in containers:
        items = container.values() if isinstance(container, dict) else container
        inner_containers += [item for item in items if isinstance(item, dict | list)]
    return inner_containers


def _parse_whole_number(digits: str) -> int:
    """Convert the digits of a whole number. Raises: ValueError for too many, which take long."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits, expected at most {MAX_DIGITS}")
    return int(digits)


class Record:
    """A frozen dataclass that can be written as sealed JSON and read back.

    Reading raises ValueError if the content has changed, if a field without a default is missing,
    if a field is unknown, of a wrong type or too long, and if `check` does.
    """

    def to_json(self) -> str:
        """Return the record as JSON text with its hash."""
        return seal(_fields_of(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the record that `to_json` wrote. Raises: ValueError, see the class."""
        content = parse_object(text)
        cls.check_format(content)
        return _convert(cls, _without_hash(content), cls.__name__)

    @classmethod
    def read(cls, path: Path, max_bytes: int | None = LARGEST_TEXT_BYTES) -> Self:
        """Return the record in a file that has the text of `to_json`.

        max_bytes: of the largest file that is read; None: any.
        Raises: ValueError, see the class, also for a larger file; OSError.
        """
        text = read_file_text(path, max_bytes)
        return cls.from_json(text)

    @classmethod
    def check_format(cls, content: dict[str, Any]) -> None:
        """Raise ValueError for the content of a file that another version of posenc wrote, where
        that can be told; called before the hash is compared."""

    def check(self) -> None:
        """Raise ValueError for values that posenc never writes; called after reading."""


def check_count(name: str, value: int, minimum: int = 0) -> None:
    """Raise ValueError unless value is a count from `minimum` to LARGEST_COUNT."""
    if not minimum <= value <= LARGEST_COUNT:
        got_in_words = (
            str(value) if len(str(value)) < 20 else f"a number of {len(str(value))} digits"
        )
        raise ValueError(f"{name} must be from {minimum} to 2^53, got {got_in_words}.")


def check_text_length(name: str, value: str, max_letters: int) -> None:
    """Raise ValueError if value has more than `max_letters` letters."""
    if len(value) > max_letters:
        raise ValueError(f"{name} has {len(value):,} letters, expected at most {max_letters:,}.")


def check_rising(name: str, values: Sequence[int], max_values: int) -> None:
    """Raise ValueError unless there are at most `max_values` values, each above the one before."""
    if len(values) > max_values:
        raise ValueError(f"{name}: expected at most {max_values:,}, got {len(values):,}.")
    for before, after in itertools.pairwise(values):
        if not before < after:
            raise ValueError(f"{name} must rise, got {before} before {after}.")


def _hash_of_content(
    content: dict[str, Any], read_back: Callable[[Any], Any] = lambda value: value
) -> str:
    """Return the SHA-256, in hex digits, of content as JSON with its keys sorted.

    The text is hashed item by item, because a study of thousands of trials takes much memory.
    read_back: is called with each item, and returns what to hash of it.
    """
    sha256 = hashlib.sha256()
    for text in _sorted_json(content, read_back):
        sha256.update(text.encode())
    return sha256.hexdigest()


def _sorted_json(content: dict[str, Any], read_back: Callable[[Any], Any]) -> Iterator[str]:
    """Yield the parts of json.dumps(content, sort_keys=True): keys, values, and each item of a
    value that is a list.

    read_back: see `_hash_of_content`."""
    separator = "{"
    for key in sorted(content):
        yield f"{separator}{json.dumps(key)}: "
        separator = ", "
        value = content[key]
        if isinstance(value, list | tuple) and value:
            for index, item in enumerate(value):
                item_text = json.dumps(read_back(item), sort_keys=True, allow_nan=False)
                yield f", {item_text}" if index else f"[{item_text}"
            yield "]"
        else:
            yield json.dumps(read_back(value), sort_keys=True, allow_nan=False)
    yield "}" if content else "{}"


def _refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for the word NaN, Infinity or -Infinity, with which `json` calls this
    function."""
    raise ValueError(f"it holds {name}, which is no number")


def _convert(target_type: Any, value: Any, place: str) -> Any:
    """Convert `value` from JSON to the type `target_type`: a dataclass, a union with None, a tuple
    of one kind, a dict with texts as keys, a number or a text.

    place: what a message calls the value. Raises: ValueError if it is of another type or too large.
    """
    origin = typing.get_origin(target_type)
    if origin is types.UnionType:
        return _convert_optional(target_type, value, place)
    _refuse_large(value, place)
    if origin is tuple:
        return _convert_tuple(target_type, value, place)
    if origin is dict:
        return _convert_dict(target_type, value, place)
    if dataclasses.is_dataclass(target_type):
        return _convert_dataclass(target_type, value, place)
    if target_type is float:
        return _convert_float(value, place)
    # isinstance(value, int) would let a bool through.
    if target_type is int and isinstance(value, bool):
        raise ValueError(f"{place}: expected a number, got {value}.")
    if isinstance(target_type, type) and isinstance(value, target_type):
        return value
    raise _wrong_type_error(target_type, value, place)


def _wrong_type_error(target_type: Any, value: Any, place: str) -> ValueError:
    """Return the error for a value of another type than `target_type`. It names both types, and
    the place in the file, `place`."""
    return ValueError(f"{place}: expected {target_type}, got {type(value).__name__}.")


def _refuse_large(value: Any, place: str) -> None:
    """Raise ValueError for a list, an object or a text beyond the bounds above."""
    if isinstance(value, list | dict) and len(value) > MAX_ITEMS:
        raise ValueError(f"{place}: expected at most {MAX_ITEMS:,} items, got {len(value):,}.")
    if isinstance(value, str) and len(value) > MAX_LETTERS:
        raise ValueError(
            f"{place}: expected a text of at most {MAX_LETTERS:,} letters, got {len(value):,}."
        )


def _convert_optional(target_type: Any, value: Any, place: str) -> Any:
    """Convert a value to the first type of a union that is not None. None stays None if the union
    has it."""
    alternatives = typing.get_args(target_type)
    if value is None and types.NoneType in alternatives:
        return None
    for alternative in alternatives:
        if alternative is not types.NoneType:
            return _convert(alternative, value, place)
    raise AssertionError(f"{target_type} allows nothing but None")


def _convert_tuple(target_type: Any, value: Any, place: str) -> tuple[Any, ...]:
    """Convert a list to the type `target_type`, tuple[X, ...]: return a tuple with each item
    converted to X. Raise ValueError for anything but a list, and as `_convert`."""
    if not isinstance(value, list):
        raise _wrong_type_error(target_type, value, place)
    item_type = typing.get_args(target_type)[0]
    # Losses of windows are most of a study, so that lists of plain numbers have a short way.
    if item_type is float and all(
        type(item) is float and -LARGEST_NUMBER <= item <= LARGEST_NUMBER for item in value
    ):
        return tuple(value)
    return tuple(_convert(item_type, item, f"{place}[{i}]") for i, item in enumerate(value))


def _convert_dict(target_type: Any, value: Any, place: str) -> dict[str, Any]:
    """Convert a dict to the type `target_type`, dict[str, X]: return its items with each value
    converted to X. Raise ValueError for a key that is no text or too long, and as `_convert`."""
    if not isinstance(value, dict):
        raise _wrong_type_error(target_type, value, place)
    item_type = typing.get_args(target_type)[1]
    converted: dict[str, Any] = {}
    for key, item in value.items():
        name = _convert(str, key, f"{place}: a key")
        converted[name] = _convert(item_type, item, f"{place}[{key[:_LONGEST_NAME_SHOWN]!r}]")
    return converted


def _convert_float(value: Any, place: str) -> float:
    """Convert a number to a float. Raise ValueError for a bool or anything else that is no number,
    for NaN, and for a number beyond LARGEST_NUMBER on either side of 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong_type_error(float, value, place)
    if not abs(value) <= LARGEST_NUMBER:  # NaN fails, too
        raise ValueError(
            f"{place}: expected a number of at most {LARGEST_NUMBER}, got {value:.3g}."
        )
    return float(value)


def _convert_dataclass(target_type: Any, value: Any, place: str) -> Any:
    """Build the dataclass `target_type` of the fields in the dict `value`, and call its `check` if
    it has one. Raise ValueError for anything but a dict, for wrong fields, and as `check`."""
    if not isinstance(value, dict):
        raise _wrong_type_error(target_type, value, place)
    _check_fields(target_type, value, place)
    hints = _type_hints(target_type)
    field_values = {name: _convert(hints[name], v, f"{place}.{name}") for name, v in value.items()}
    instance = target_type(**field_values)
    check = getattr(instance, "check", None)
    if check is None:
        return instance
    try:
        check()
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return instance


@functools.cache
def _type_hints(record_type: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name; to find them out takes long."""
    return typing.get_type_hints(record_type)


def _check_fields(target_type: Any, value: dict[str, Any], place: str) -> None:
    """Raise ValueError for fields that the dataclass `target_type` needs or does not have."""
    fields = {field.name: field for field in dataclasses.fields(target_type)}
    needed_names = {
        name for name, field in fields.items() if field.default is field.default_factory is MISSING
    }
    missing_names = needed_names - value.keys()
    unknown_names = value.keys() - fields.keys()
    if wrong_names := sorted(missing_names | unknown_names):
        cut_names = [name[:_LONGEST_NAME_SHOWN] for name in wrong_names]
        names_in_words = ", ".join(
            name if name.isidentifier() else repr(name) for name in cut_names
        )
        raise ValueError(f"{place}: missing or unknown fields: {names_in_words}.")
