"""Look up encodings by name: posenc's own, registered ones and those of other packages.

A name that only this process knows is replaced, for another process, by the file and class that it
stands for:

>>> from posenc.encodings.registry.grammar import parse
>>> str(with_importable_classes(parse("rope/alibi")))  # known everywhere
'rope/alibi'
"""

import difflib
import functools
import importlib.metadata
import inspect
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posenc.arguments import explain_misfits
from posenc.encodings.registry.entries import _ENTRIES, Entry
from posenc.encodings.registry.grammar import Option, Part, Spec, SpecError
from posenc.encodings.registry.other_names import class_and_name_of

if TYPE_CHECKING:
    from posenc.encodings.base.position_encoding import PositionEncoding

ENTRY_POINT_GROUP = "posenc.encodings"
"""Entry-point group in which other packages name their encodings, as module:Class."""

_registered: dict[str, Entry] = {}
_classes: "dict[str, type[PositionEncoding]]" = {}


@explain_misfits
def names() -> tuple[str, ...]:
    """Return the names of all encodings: posenc's own, then those given by `register` and by other
    packages.

    >>> "rope" in posenc.names()
    True
    """
    return tuple(dict.fromkeys((*_ENTRIES, *_registered, *_entries_of_packages()[0])))


def entry(name: str) -> Entry:
    """Return the registry's entry of `name`, with class and defaults. Raise ValueError if it is
    unknown; the message has the most similar name."""
    if name in _ENTRIES:  # no need to read the entry points of installed packages
        return _ENTRIES[name]
    if name in _registered:
        return _registered[name]
    package_entries, reason_by_name = _entries_of_packages()
    if name in package_entries:
        return package_entries[name]
    if name in reason_by_name:
        raise ValueError(reason_by_name[name])
    nearest_name = _nearest_name(name)
    hint = f"Did you mean {nearest_name!r}?" if nearest_name else f"Known: {', '.join(names())}."
    raise ValueError(f"Unknown encoding {name!r}. {hint}")


def _nearest_name(name: str) -> str:
    """Return the registered name of the encoding that other libraries call `name`, or else the
    registered name that is spelt most like it; "" if none is similar."""
    class_and_name = class_and_name_of(name)
    if class_and_name is not None and class_and_name[1]:
        return class_and_name[1]
    nearest_name = ""
    best_likeness = 0.6  # the cutoff of difflib.get_close_matches
    for registered_name in names():
        likeness = difflib.SequenceMatcher(None, registered_name, name.lower()).ratio()
        if likeness > best_likeness:  # the first of equals: rope, not rove, for roep
            nearest_name = registered_name
            best_likeness = likeness
    return nearest_name


def class_of(name: str) -> "type[PositionEncoding]":
    """Return the class that a registered name stands for. Raise ValueError if the name is unknown,
    or if another package's class cannot be imported."""
    found_entry = entry(name)
    if name in _classes:
        return _classes[name]
    # Loaded here, because it loads torch, which the names do without.
    from posenc.encodings.registry.user_code import load_class

    module, _, attribute = found_entry.class_path.partition(":")
    try:
        return load_class(module, attribute)
    except ValueError as error:
        raise ValueError(f"{name!r}, defined by {found_entry.origin}: {error}") from error


def class_of_part(spec: Spec, part: Part) -> "type[PositionEncoding]":
    """Return the class that one part of a text names. Raise SpecError, with the column, if there is
    no such class."""
    from posenc.encodings.registry.user_code import load_class

    try:
        if part.attribute and part.name_or_module not in _ENTRIES:
            return load_class(part.name_or_module, part.attribute)
        cls = class_of(part.name_or_module)
    except SpecError:
        raise
    except ValueError as error:
        if spec.text.strip() == part.name_or_module:  # the message has the whole text already
            raise
        raise spec.error(part.column, str(error)) from error
    if part.attribute:
        raise spec.error(
            part.attribute_column,
            f"an option of {part.name_or_module} is key=value; {part.attribute!r} has no value.",
        )
    return cls


@explain_misfits
def register(name: str, encoding: "type[PositionEncoding]", **defaults: Any) -> None:
    """Give an encoding a name in this process, for `posenc.create`, `posenc.names`, `compare.run`
    and `inspect.measure_encodings`.

    For every process, and so for the command line, a package names its encodings by entry points in
    the group "posenc.encodings": `my_name = "my_package.encodings:MyEncoding"`.

    Args:
        name: letters, digits and underscores.
        encoding: the class.
        defaults: default options of its constructor.

    Raises: ValueError for an invalid name or one of another class; TypeError if `encoding` is no
    subclass of PositionEncoding.

    >>> class Slow(posenc.ALiBi):
    ...     pass
    >>> posenc.register("slow", Slow, bias_max=4.0)
    >>> posenc.create("slow", posenc.ModelShape(64, 2)).slopes
    (0.25, 0.0625)
    """
    from posenc.encodings.base.position_encoding import PositionEncoding

    if not (isinstance(encoding, type) and issubclass(encoding, PositionEncoding)):
        raise TypeError(f"register: {encoding!r} is no subclass of posenc.PositionEncoding.")
    if not _is_name(name):
        raise ValueError(f"register: a name has letters, digits and underscores, got {name!r}.")
    class_path = f"{encoding.__module__}:{encoding.__qualname__}"
    existing_entry = (
        _ENTRIES.get(name) or _registered.get(name) or _entries_of_packages()[0].get(name)
    )
    if existing_entry is not None and existing_entry.class_path != class_path:
        if name in _classes and _qualname_and_file(_classes[name]) == _qualname_and_file(encoding):
            return  # the same class of the same file, loaded under another module name
        raise ValueError(
            f"register: {name!r} is {existing_entry.class_path} already; choose another name."
        )
    _registered[name] = Entry(class_path, "unchecked", defaults, "this program")
    _classes[name] = encoding


def lines_on_unusable_names() -> tuple[str, ...]:
    """Return a sentence about each encoding of other packages that cannot be used by its name."""
    return tuple(_entries_of_packages()[1].values())


def with_importable_classes(spec: Spec) -> Spec:
    """Return the spec with names that `register` gave replaced by the file or module of their
    class. So another process, started in the same folder, can build it. Raise SpecError if no other
    process could."""
    layers = tuple(
        tuple(_part_for_another_process(spec, part) for part in layer) for layer in spec.layers
    )
    return replace(spec, layers=layers)


def with_relative_paths(spec: Spec) -> Spec:
    """Return the spec with relative paths for files that are below the current folder."""
    return replace(
        spec, layers=tuple(tuple(map(_with_relative_path, layer)) for layer in spec.layers)
    )


def _part_for_another_process(spec: Spec, part: Part) -> Part:
    """Return a part that another process can build. A name that `register` gave is replaced by
    module and class, with its defaults as options.

    Raises: SpecError if its class or a default cannot be passed on.
    """
    if part.attribute or part.name_or_module not in _classes:
        return _with_relative_path(part)
    try:
        module_or_file, attribute = _importable_module_and_class(part.name_or_module)
    except ValueError as error:
        raise spec.error(part.column, str(error)) from error
    options_in_text = {option.key for option in part.options}
    default_options = []
    for key, value in entry(part.name_or_module).defaults.items():
        if key in options_in_text:
            continue
        if not isinstance(value, int | float | bool | str | None):
            reason = (
                f"{part.name_or_module} was registered with {key}={value!r}, which cannot be "
                "passed to another process; give numbers, words, true or false."
            )
            raise SpecError(spec.text, part.column, reason)
        default_options.append(Option(key, value))
    return _with_relative_path(
        Part(module_or_file, attribute, (*default_options, *part.options), column=part.column)
    )


def _importable_module_and_class(name: str) -> tuple[str, str]:
    """Return the module or file from which another process can load the class that `register`
    named, and the name of the class in it.

    Raises: ValueError for a class that is not at the top of a file.
    """
    cls = _classes[name]
    has_file = bool(getattr(sys.modules.get(cls.__module__), "__file__", None))
    if "<locals>" in cls.__qualname__ or not has_file:
        raise ValueError(
            f"{name!r} is a class that another process cannot import: define {cls.__qualname__} at "
            "the top of a file."
        )
    # The program itself is another module in another process, so it is named by its file.
    file = inspect.getsourcefile(cls) if cls.__module__ == "__main__" else None
    return file or cls.__module__, cls.__qualname__


def _with_relative_path(part: Part) -> Part:
    """Return the part with a relative path if it names a file below the current folder; otherwise
    unchanged."""
    if not part.is_file:
        return part
    path = Path(part.name_or_module).expanduser().resolve()
    working_folder = Path.cwd().resolve()
    shown_path = path.relative_to(working_folder) if path.is_relative_to(working_folder) else path
    return replace(part, name_or_module=shown_path.as_posix())


@functools.cache
def _entries_of_packages() -> tuple[dict[str, Entry], dict[str, str]]:
    """Return two dicts by name: the entries of encodings that installed packages define by entry
    points, and a sentence about each encoding that cannot be used. The packages are not imported.
    """
    entries: dict[str, Entry] = {}
    reason_by_name: dict[str, str] = {}
    try:
        entry_points = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP))
    except Exception as error:  # one broken package must not break posenc
        return {}, {"": f"Entry points of installed packages cannot be read: {error}."}
    for entry_point in entry_points:
        name = entry_point.name
        origin = _package_and_version(entry_point)
        if not _is_name(name):
            reason_by_name[name] = f"{origin} names an encoding {name!r}, which is no valid name."
        elif not re.fullmatch(r"[\w.]+:[\w.]+", entry_point.value):
            reason_by_name[name] = (
                f"{origin} defines {name!r} as {entry_point.value!r}, which is no module:Class."
            )
        elif name in _ENTRIES:
            reason_by_name[name] = f"{origin} defines {name!r}, which is an encoding of posenc."
        elif name in entries and entries[name].class_path != entry_point.value:
            reason_by_name[name] = (
                f"{entries[name].origin} and {origin} both define an encoding {name!r}."
            )
        else:
            entries[name] = Entry(entry_point.value, "unchecked", {}, origin)
    usable_entries = {
        name: usable_entry for name, usable_entry in entries.items() if name not in reason_by_name
    }
    return usable_entries, reason_by_name


def _package_and_version(entry_point: importlib.metadata.EntryPoint) -> str:
    """Return "name version" of the package that defines an entry point; "a package" if its metadata
    lack the name, or cannot be read."""
    try:
        return (
            f"{entry_point.dist.name} {entry_point.dist.version}"
            if entry_point.dist
            else "a package"
        )
    except Exception:  # the package's metadata are damaged
        return "a package"


def _qualname_and_file(cls: type) -> tuple[str, str | None]:
    """Return the qualified name of a class and the real path of its file. Both are equal for one
    class that was loaded under two module names."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return cls.__qualname__, file and os.path.realpath(file)


def _is_name(name: str) -> bool:
    """Return True if `name` is one word of letters, digits and underscores, as names must be."""
    return re.fullmatch(r"[^\W\d]\w*", name) is not None
