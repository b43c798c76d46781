"""Load encoding classes from the file or module that a text names, and hash what they are made of.

The hash stands next to stored results, so that those of an edited encoding are not used again: it
is of the named file and of the files next to it, or on PYTHONPATH, that it imports.
"""

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

from posenc.encodings.base.base import PositionEncoding
from posenc.encodings.registry.entries import _ENTRIES
from posenc.encodings.registry.grammar import Part, Spec, SpecError, parse
from posenc.encodings.registry.known import class_of, entry

_POSENC_FOLDER = Path(__file__).resolve().parents[2]
_FILE_MODULE_PREFIX = "posenc_file_"
"""Prefix of the names in sys.modules of modules that were loaded by path."""


def class_of_part(spec: Spec, part: Part) -> type[PositionEncoding]:
    """Return the class that one part of a text names. Raise SpecError with the column of a
    mistake."""
    try:
        if part.attribute and part.where not in _ENTRIES:
            return load_class(part.where, part.attribute)
        cls = class_of(part.where)
    except SpecError:
        raise
    except ValueError as error:
        if spec.text.strip() == part.where:  # the message has the whole text already
            raise
        raise spec.error(part.column, str(error)) from error
    if part.attribute:
        raise spec.error(
            part.attribute_column,
            f"an option of {part.where} is key=value; {part.attribute!r} has no value.",
        )
    return cls


def load_class(where: str, attribute: str) -> type[PositionEncoding]:
    """Return the encoding class `attribute` of the file or module `where`, see `load_object`.

    Raises: ValueError if it cannot be loaded or is no subclass of PositionEncoding.
    """
    module = import_file_or_module(where)
    defined = [
        name
        for name, value in vars(module).items()
        if is_encoding_class(value) and value.__module__ == module.__name__
    ]
    it_defines = f"it defines {', '.join(defined)}" if defined else "it defines none"
    try:
        loaded = load_object(where, attribute)
    except AttributeError:
        near = difflib.get_close_matches(attribute, defined, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f": {it_defines}."
        raise ValueError(f"{where} has no class {attribute!r}{hint}") from None
    if is_encoding_class(loaded):
        return loaded
    kind = "class" if isinstance(loaded, type) else type(loaded).__name__
    raise ValueError(
        f"{where}: {attribute!r} is a {kind} and no posenc.PositionEncoding; {it_defines}."
    )


def load_object(where: str, attribute: str) -> Any:
    """Return the object `attribute` of the file or module `where`.

    A file needs no import path. Its folder is searched last, so it can import its neighbours, but
    they cannot shadow a library. A module may be in the current folder.
    Raises: ValueError, with the line of a file, if the import fails; AttributeError if the
    attribute is missing.
    """
    inner: Any = import_file_or_module(where)
    for name in attribute.split("."):
        inner = getattr(inner, name)
    return inner


def path_of_class(kind: type) -> str:
    """Return "module:Class" of a class; the module of a user's file is its name without ".py"."""
    module = kind.__module__
    if module.startswith(_FILE_MODULE_PREFIX):
        module = module.removeprefix(_FILE_MODULE_PREFIX).partition("_")[2]
    return f"{module}:{kind.__qualname__}"


def is_encoding_class(value: Any) -> TypeGuard[type[PositionEncoding]]:
    """Return True if the object is a subclass of PositionEncoding."""
    return isinstance(value, type) and issubclass(value, PositionEncoding)


def import_file_or_module(where: str) -> ModuleType:
    """Import and return the file or module `where`, such as "./my.py" or "my_package.encodings".
    Raises: as `load_object`."""
    return (
        _import_file(Path(where).expanduser()) if where.endswith(".py") else _import_module(where)
    )


def _import_file(path: Path) -> ModuleType:
    """Return the module of a file, imported now unless a module of the same content is known.

    Raises: as `load_object`.
    """
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else "."
        raise ValueError(f"there is no file {path}{hint}")
    path = path.resolve()
    source = path.read_bytes()
    hash_of_path = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    name = f"{_FILE_MODULE_PREFIX}{hash_of_path}_{path.stem}"
    content = hashlib.sha256(source).hexdigest()
    imported_before = sys.modules.get(name)
    if imported_before is not None and getattr(imported_before, "_content", None) == content:
        return imported_before
    module = ModuleType(name)
    module.__file__ = str(path)
    vars(module)["_content"] = content
    _append_to_import_path(path.parent)
    sys.modules[name] = module
    try:
        with _stdout_to_stderr():
            exec(compile(source, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
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
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # Otherwise the module is there, and it is one of its own imports that is missing.
        if missing and (name == missing or name.startswith(f"{missing}.")):
            raise ValueError(
                f"there is no module {missing!r}, neither installed nor in the current folder."
            ) from error
        raise ValueError(f"module {name} does not import: {_error_in_one_line(error)}") from error


def _error_with_line(path: Path, error: BaseException) -> str:
    """Return an error of importing the file `path` as one line: "file:line: class: message."."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}."
    return f"{line_in_user_code(error) or f'{path}:1'}: {_error_in_one_line(error)}"


def line_in_user_code(error: BaseException) -> str:
    """Return "file:line" of the deepest frame outside posenc, Python and installed packages, which
    is in the user's code; "" if there is none."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    posenc = Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        ours = path.is_relative_to(posenc) or path.is_relative_to(stdlib)
        if not (installed or ours or frame.filename.startswith("<")):
            return f"{os.path.relpath(path)}:{frame.lineno}"
    return ""


def _error_in_one_line(error: BaseException) -> str:
    """Return "class: message." of an error, in one line of at most 300 characters of message."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}".rstrip(".: ") + "."


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr meanwhile, so that prints of a user's module do not mix with a
    command's output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def _append_to_import_path(folder: Path) -> None:
    """Append the folder to the import path, where it shadows no library."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.append(text)
        importlib.invalidate_caches()


def hash_of_user_code(text: str) -> str:
    """Return twelve digits that depend on the source files of the encodings outside posenc that a
    text names; "" if all are posenc's own."""
    spec = parse(text)
    return hash_of_modules([module for part in spec.parts for module in _module_names(spec, part)])


def hash_of_posenc_code(text: str) -> str:
    """Return twelve digits that change with the files of posenc which the encodings named in `text`
    use, and with the options that are registered with them.

    A class outside posenc may use any encoding of posenc, so it counts all of them.
    """
    spec = parse(text)
    digests = []
    for part in spec.parts:
        modules = _module_names(spec, part)
        if all(map(_is_in_posenc, modules)):
            files: Iterable[Path] = files_of_module(modules[0])
        else:
            files = [
                file
                for folder in ("encodings", "frequencies")
                for file in sorted((_POSENC_FOLDER / folder).rglob("*.py"))
            ]
        options = {} if part.attribute else entry(part.where).defaults
        digests.append(_hash_files(files) + repr(sorted(options.items())))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def hash_of_modules(modules: Iterable[str]) -> str:
    """Return twelve digits that depend on the source files of those modules that are not posenc's,
    and on what they import; "" if all are posenc's own."""
    files: dict[Path, None] = {}  # in order, each once
    for module in modules:
        if not _is_in_posenc(module):
            files.update(dict.fromkeys(files_of_module(module)))
    return _hash_files(files) if files else ""


def files_of_module(module: str) -> tuple[Path, ...]:
    """Return the file of a loaded module, and the files that it imports, also indirectly: those
    below the folder from which it was imported, and on PYTHONPATH. () if it has no file."""
    name = getattr(sys.modules.get(module), "__file__", None)
    if name is None:
        return ()
    file = Path(name).resolve()
    # a.b.c is in the folder "a/b" below its root, or in "a/b/c" if it is a package.
    folders = 0 if module.startswith(_FILE_MODULE_PREFIX) else module.count(".")
    if file.name == "__init__.py":
        folders += 1
    return tuple(sorted(_file_and_imported_files(file, root=file.parents[folders])))


def _module_names(spec: Spec, part: Part) -> list[str]:
    """Return the names of the module that defines a part's class and, for a class given by file or
    module, of that one, which may only import or make the class."""
    named = [import_file_or_module(part.where).__name__] if part.attribute else []
    return [class_of_part(spec, part).__module__, *named]


def _is_in_posenc(module: str) -> bool:
    """Return True for the name of a module of this package."""
    return module.partition(".")[0] == "posenc"


def _hash_files(files: Iterable[Path]) -> str:
    """Return 12 hexadecimal digits that depend on the contents of the files and on their order."""
    digests = [hashlib.sha256(_read_or_empty(file)).hexdigest() for file in files]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


class _FileBelowRoot(NamedTuple):
    """Hold a file and the folder from which it is imported."""

    file: Path
    root: Path


def _file_and_imported_files(start: Path, root: Path) -> set[Path]:
    """Return the file `start` and all files that it imports, also indirectly.

    For a user's file these are the files below `root` or on PYTHONPATH; for one of an installed
    package the files of that package; for one of posenc's own those of posenc.
    """
    is_in_posenc = start.is_relative_to(_POSENC_FOLDER)
    installed = {Path(sysconfig.get_path(n)).resolve() for n in ("purelib", "platlib", "stdlib")}
    package = start.relative_to(root).parts[0].removesuffix(".py") if root in installed else None
    roots = [root]
    if package is None and not is_in_posenc:
        roots += _python_path_folders()

    # Most files of a package import from the same modules: look for each of these once, and anew
    # in the next walk, since a user may have written another file by then.
    files_at = cache(_files_of_package_or_module)
    files: set[Path] = set()
    waiting = [_FileBelowRoot(start, root)]
    while waiting:
        file, above = waiting.pop()
        if file in files:
            continue
        if not is_in_posenc and file.resolve().is_relative_to(_POSENC_FOLDER):
            continue  # posenc's own files, from a copy on PYTHONPATH, are not the user's
        files.add(file)
        for name in _imported_names(_read_or_empty(file), file.relative_to(above).parent.parts):
            if package is None or name.partition(".")[0] == package:
                for place in roots:
                    for where in _packages_and_module(place, name):
                        waiting += [_FileBelowRoot(f, place) for f in files_at(where, place)]
    return files


def _python_path_folders() -> list[Path]:
    """Return the folders on PYTHONPATH, without those of installed packages."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [Path(folder).resolve() for folder in folders if folder and "-packages" not in folder]


@lru_cache(maxsize=512)
def _imported_names(source: bytes, package: tuple[str, ...]) -> tuple[str, ...]:
    """Return the full names of modules that a source file in `package` may import; () if it cannot
    be parsed. `package`: folders between the file and its root."""
    try:
        return tuple(_iterate_imported_names(ast.parse(source), package))
    except (SyntaxError, ValueError):
        return ()


def _iterate_imported_names(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the full names that a parsed module of `package` imports, attributes among them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package itself, each further one a folder above it.
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*above, node.module] if node.module else above)
            yield from (f"{start}.{alias.name}".lstrip(".") for alias in node.names)


def _packages_and_module(root: Path, name: str) -> Iterator[Path]:
    """Yield the places below `root` of what an import of a name such as "a.b.c" runs: a, a/b and
    a/b/c."""
    place = root
    for part in name.split("."):
        place = place / part
        yield place


def _files_of_package_or_module(place: Path, root: Path) -> tuple[Path, ...]:
    """Return the files there are of the module or package at a place such as a/b below `root`:
    a/b.py, a/b/__init__.py."""
    files = []
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file():
            resolved = file.resolve()
            files.append(resolved if resolved.is_relative_to(root) else file)
    return tuple(files)


def _read_or_empty(file: Path) -> bytes:
    """Return the content of a file as bytes; b"" if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:  # deleted after it was imported
        return b""
