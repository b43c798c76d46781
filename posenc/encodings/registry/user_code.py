"""Load the encoding classes of users from the file or module that a text names."""

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

from posenc.encodings.base.position_encoding import PositionEncoding

FILE_MODULE_PREFIX = "posenc_file_"
"""Prefix of the names in sys.modules of modules that were loaded by path."""


def load_class(file_or_module: str, attribute: str) -> type[PositionEncoding]:
    """Return the encoding class `attribute` of a file or module, loaded as `load_object` does.

    Raises: ValueError if it cannot be loaded or is no subclass of PositionEncoding.
    """
    module = import_file_or_module(file_or_module)
    defined_names = [
        name
        for name, value in vars(module).items()
        if is_encoding_class(value) and value.__module__ == module.__name__
    ]
    it_defines = f"it defines {', '.join(defined_names)}" if defined_names else "it defines none"
    try:
        loaded_object = load_object(file_or_module, attribute)
    except AttributeError:
        nearest_names = difflib.get_close_matches(attribute, defined_names, n=1)
        hint = f"; did you mean {nearest_names[0]!r}?" if nearest_names else f": {it_defines}."
        raise ValueError(f"{file_or_module} has no class {attribute!r}{hint}") from None
    if is_encoding_class(loaded_object):
        return loaded_object
    kind_of_object = "class" if isinstance(loaded_object, type) else type(loaded_object).__name__
    raise ValueError(
        f"{file_or_module}: {attribute!r} is a {kind_of_object} and no posenc.PositionEncoding; "
        f"{it_defines}."
    )


def load_object(file_or_module: str, attribute: str) -> Any:
    """Return the object `attribute` of a file or module, such as "./my.py" or "my_package.mine".

    A file need not be on the import path. Its folder is searched last, so it can import its
    neighbours, but they cannot shadow a library. A module may be in the current folder.
    Raises: ValueError if the import fails, with the line if it is a file; AttributeError if the
    attribute is missing.
    """
    loaded_object: Any = import_file_or_module(file_or_module)
    for name in attribute.split("."):
        loaded_object = getattr(loaded_object, name)
    return loaded_object


def path_of_class(cls: type) -> str:
    """Return "module:Class" of a class. For a class from a user's file, the module is the name of
    the file without ".py"."""
    module_name = cls.__module__
    if module_name.startswith(FILE_MODULE_PREFIX):
        module_name = module_name.removeprefix(FILE_MODULE_PREFIX).partition("_")[2]
    return f"{module_name}:{cls.__qualname__}"


def is_encoding_class(value: Any) -> TypeGuard[type[PositionEncoding]]:
    """Return True if the object is a subclass of PositionEncoding."""
    return isinstance(value, type) and issubclass(value, PositionEncoding)


def import_file_or_module(file_or_module: str) -> ModuleType:
    """Import a file such as "./my.py", or a module such as "my_package.encodings", and return the
    module. Raises: as `load_object`."""
    if file_or_module.endswith(".py"):
        return _import_file(Path(file_or_module).expanduser())
    return _import_module(file_or_module)


def _import_file(path: Path) -> ModuleType:
    """Return the module of a file. It is imported now, unless it was imported before with the same
    content.

    Raises: as `load_object`.
    """
    if not path.is_file():
        file_names = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        nearest_names = difflib.get_close_matches(path.name, file_names, n=1)
        hint = f"; did you mean {path.with_name(nearest_names[0])}?" if nearest_names else "."
        raise ValueError(f"there is no file {path}{hint}")
    path = path.resolve()
    source_bytes = path.read_bytes()
    hash_of_path = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    module_name = f"{FILE_MODULE_PREFIX}{hash_of_path}_{path.stem}"
    content_hash = hashlib.sha256(source_bytes).hexdigest()
    earlier_module = sys.modules.get(module_name)
    if earlier_module is not None and getattr(earlier_module, "_content", None) == content_hash:
        return earlier_module
    module = ModuleType(module_name)
    module.__file__ = str(path)
    vars(module)["_content"] = content_hash
    _append_to_import_path(path.parent)
    sys.modules[module_name] = module
    try:
        with _stdout_to_stderr():
            exec(compile(source_bytes, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ValueError(_error_with_line(path, error)) from error
    return module


def _import_module(name: str) -> ModuleType:
    """Import a module by name, also from the working directory.

    Raises: ValueError with the reason if that fails.
    """
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            _append_to_import_path(Path.cwd())
        with _stdout_to_stderr():
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing_name = error.name if isinstance(error, ModuleNotFoundError) else None
        # Otherwise the module is there, and it is one of its own imports that is missing.
        if missing_name and (name == missing_name or name.startswith(f"{missing_name}.")):
            raise ValueError(
                f"there is no module {missing_name!r}, neither installed nor in the current folder."
            ) from error
        raise ValueError(f"module {name} does not import: {_error_in_one_line(error)}") from error


def _error_with_line(path: Path, error: BaseException) -> str:
    """Return an error of importing the file `path` as one line: "file:line: class: message."."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}."
    return f"{line_in_user_code(error) or f'{path}:1'}: {_error_in_one_line(error)}"


def line_in_user_code(error: BaseException) -> str:
    """Return "file:line" of the deepest frame of an error that is in the user's code: outside
    posenc, Python and installed packages. Return "" if there is none."""
    stdlib_folder = Path(sysconfig.get_path("stdlib"))
    posenc_folder = Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        package_folder_names = {"site-packages", "dist-packages"} & set(path.parts)
        is_in_posenc_or_stdlib = path.is_relative_to(posenc_folder) or path.is_relative_to(
            stdlib_folder
        )
        if not (package_folder_names or is_in_posenc_or_stdlib or frame.filename.startswith("<")):
            return f"{os.path.relpath(path)}:{frame.lineno}"
    return ""


def _error_in_one_line(error: BaseException) -> str:
    """Return "class: message." of an error, in one line of at most 300 characters of message."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}".rstrip(".: ") + "."


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Return a context manager that redirects stdout to stderr, so that prints of a user's module
    do not mix with a command's output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _append_to_import_path(folder: Path) -> None:
    """Append the folder to the import path, as the last one, so that it shadows no library."""
    folder_text = str(folder.resolve())
    if folder_text not in sys.path:
        sys.path.append(folder_text)
        importlib.invalidate_caches()
