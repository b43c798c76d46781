"""Load encoding classes from the file or module that a text names."""

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from posenc.encodings.base.base import PositionEncoding

MODULE = "posenc_file_"
"""Prefix in sys.modules of modules that were loaded by path."""


def load(where: str, attribute: str) -> type[PositionEncoding]:
    """Return the encoding class `attribute` of the file or module `where`, see `find`.

    Raises: ValueError if it cannot be loaded or is no subclass of PositionEncoding.
    """
    module = imported(where)
    own = [
        name
        for name, value in vars(module).items()
        if is_encoding(value) and value.__module__ == module.__name__
    ]
    defined = f"it defines {', '.join(own)}" if own else "it defines none"
    try:
        found = find(where, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, own, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": {defined}."
        raise ValueError(f"{where} has no class {attribute!r}{hint}") from None
    if is_encoding(found):
        return found
    kind = "class" if isinstance(found, type) else type(found).__name__
    raise ValueError(
        f"{where}: {attribute!r} is a {kind} and no posenc.PositionEncoding; {defined}."
    )


def find(where: str, attribute: str) -> Any:
    """Return the object `attribute` of the file or module `where`.

    A file needs no import path. Its folder is searched last, so it can import its neighbours, but
    they cannot shadow a library. A module may be in the current folder.
    Raises: ValueError, with the line of a file, if the import fails; AttributeError if the
    attribute is missing.
    """
    found: Any = imported(where)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def path_of(kind: type) -> str:
    """Return "module:Class" of a class; the module of a user's file is its name without ".py"."""
    module = kind.__module__
    if module.startswith(MODULE):
        module = module.removeprefix(MODULE).partition("_")[2]
    return f"{module}:{kind.__qualname__}"


def is_encoding(found: Any) -> TypeGuard[type[PositionEncoding]]:
    """Return True if the object is a subclass of PositionEncoding."""
    return isinstance(found, type) and issubclass(found, PositionEncoding)


def imported(where: str) -> ModuleType:
    """Import the file or module `where`. Raises: as `find`."""
    return _file(Path(where).expanduser()) if where.endswith(".py") else _module(where)


def _file(path: Path) -> ModuleType:
    """Import a file, again only if its content has changed."""
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        hint = difflib.get_close_matches(path.name, near, n=1)
        end = f"; did you mean {path.with_name(hint[0])}?" if hint else "."
        raise ValueError(f"there is no file {path}{end}")
    path = path.resolve()
    source = path.read_bytes()
    place = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{MODULE}{place}_{path.stem}"
    content = hashlib.sha256(source).hexdigest()
    known = sys.modules.get(name)
    if known is not None and getattr(known, "_content", None) == content:
        return known
    module = ModuleType(name)
    module.__file__, vars(module)["_content"] = str(path), content
    _search_last(path.parent)
    sys.modules[name] = module
    try:
        with _no_output():
            exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(_own_line(path, error)) from error
    return module


def _module(name: str) -> ModuleType:
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            _search_last(Path.cwd())
        with _no_output():
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ValueError(
                f"there is no module {missing!r}, neither installed nor in the current folder."
            ) from error
        raise ValueError(f"module {name} does not import: {_reason(error)}") from error


def _own_line(path: Path, error: BaseException) -> str:
    """Return the error with file and line."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}."
    return f"{own_line(error) or f'{path}:1'}: {_reason(error)}"


def own_line(error: BaseException) -> str:
    """Return "file:line" of the deepest frame outside posenc, Python and installed packages, which
    is in the user's code; "" if there is none."""
    stdlib, posenc = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        ours = path.is_relative_to(posenc) or path.is_relative_to(stdlib)
        if not (installed or ours or frame.filename.startswith("<")):
            return f"{os.path.relpath(path)}:{frame.lineno}"
    return ""


def _reason(error: BaseException) -> str:
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return said.rstrip(".: ") + "."


@contextlib.contextmanager
def _no_output() -> Iterator[None]:
    """Redirect stdout, so that prints of a user's module do not mix with a command's output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _search_last(folder: Path) -> None:
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.append(text)
        importlib.invalidate_caches()
