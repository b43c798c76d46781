"""Hash the source of the encodings that a text names.

The hash is stored with results, so that those of an encoding that was edited later are not used
again. It covers the named file, and the files that it imports from its folder or from PYTHONPATH.
"""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from posenc.encodings.registry.grammar import Part, Spec, parse
from posenc.encodings.registry.lookup import class_of_part, entry
from posenc.encodings.registry.user_code import FILE_MODULE_PREFIX, import_file_or_module

_POSENC_FOLDER = Path(__file__).resolve().parents[2]


def hash_of_user_code(text: str) -> str:
    """Return a hash, twelve hexadecimal digits, of the source files outside posenc that define the
    encodings named in `text`; "" if all are posenc's own."""
    spec = parse(text)
    return hash_of_modules(
        [module_name for part in spec.parts for module_name in _module_names(spec, part)]
    )


def hash_of_posenc_code(text: str) -> str:
    """Return a hash, twelve hexadecimal digits, of posenc's files that the encodings named in
    `text` use, and of the options that are registered with them.

    A class outside posenc may use any encoding of posenc, so for one of these the files of all
    encodings count.
    """
    spec = parse(text)
    texts_to_hash = []
    for part in spec.parts:
        module_names = _module_names(spec, part)
        if all(map(_is_in_posenc, module_names)):
            files: Iterable[Path] = files_of_module(module_names[0])
        else:
            files = [
                file
                for folder in ("encodings", "frequencies")
                for file in sorted((_POSENC_FOLDER / folder).rglob("*.py"))
            ]
        options = {} if part.attribute else entry(part.name_or_module).defaults
        texts_to_hash.append(_hash_files(files) + repr(sorted(options.items())))
    return hashlib.sha256(" ".join(texts_to_hash).encode()).hexdigest()[:12]


def hash_of_modules(module_names: Iterable[str]) -> str:
    """Return a hash, twelve hexadecimal digits, of the source files of those of `module_names` that
    are not posenc's, and of what they import; "" if all are posenc's own."""
    files: dict[Path, None] = {}  # in order, each once
    for module_name in module_names:
        if not _is_in_posenc(module_name):
            files.update(dict.fromkeys(files_of_module(module_name)))
    return _hash_files(files) if files else ""


def files_of_module(module_name: str) -> tuple[Path, ...]:
    """Return the file of a loaded module, and the files that it imports, also indirectly, from the
    folder in which its import began and from PYTHONPATH. Return () if the module has no file."""
    file_name = getattr(sys.modules.get(module_name), "__file__", None)
    if file_name is None:
        return ()
    file = Path(file_name).resolve()
    # a.b.c is in the folder "a/b" below its root, or in "a/b/c" if it is a package.
    depth = 0 if module_name.startswith(FILE_MODULE_PREFIX) else module_name.count(".")
    if file.name == "__init__.py":
        depth += 1
    return tuple(sorted(_file_and_imported_files(file, root=file.parents[depth])))


def _module_names(spec: Spec, part: Part) -> list[str]:
    """Return the name of the module that defines a part's class. For a class given by file or
    module, return also the name of that file or module, which may only import the class."""
    given_module_names = (
        [import_file_or_module(part.name_or_module).__name__] if part.attribute else []
    )
    return [class_of_part(spec, part).__module__, *given_module_names]


def _is_in_posenc(module_name: str) -> bool:
    """Return True if `module_name` is the name of a module of posenc."""
    return module_name.partition(".")[0] == "posenc"


def _hash_files(files: Iterable[Path]) -> str:
    """Return 12 hexadecimal digits that depend on the contents of the files and on their order."""
    digests = [hashlib.sha256(_read_or_empty(file)).hexdigest() for file in files]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


class _FileBelowRoot(NamedTuple):
    """Hold a file, and the folder from which imports find it."""

    file: Path
    root: Path


def _file_and_imported_files(first_file: Path, root: Path) -> set[Path]:
    """Return the file `first_file` and all files that it imports, also indirectly.

    For a user's file these are the files below `root` or on PYTHONPATH; for a file of an installed
    package the files of that package; for a file of posenc those of posenc.
    """
    is_in_posenc = first_file.is_relative_to(_POSENC_FOLDER)
    package_folders = {
        Path(sysconfig.get_path(n)).resolve() for n in ("purelib", "platlib", "stdlib")
    }
    installed_package = (
        first_file.relative_to(root).parts[0].removesuffix(".py")
        if root in package_folders
        else None
    )
    roots = [root]
    if installed_package is None and not is_in_posenc:
        roots += _python_path_folders()

    # Most files of a package import from the same modules: look for each of these once, and anew
    # in the next walk, since a user may have written another file by then.
    cached_files_of = cache(_files_of_package_or_module)
    files: set[Path] = set()
    unread_files = [_FileBelowRoot(first_file, root)]
    while unread_files:
        file, file_root = unread_files.pop()
        if file in files:
            continue
        if not is_in_posenc and file.resolve().is_relative_to(_POSENC_FOLDER):
            continue  # posenc's own files, from a copy on PYTHONPATH, are not the user's
        files.add(file)
        for name in _imported_names(_read_or_empty(file), file.relative_to(file_root).parent.parts):
            if installed_package is None or name.partition(".")[0] == installed_package:
                for search_root in roots:
                    for module_path in _packages_and_module(search_root, name):
                        unread_files += [
                            _FileBelowRoot(file_of_module, search_root)
                            for file_of_module in cached_files_of(module_path, search_root)
                        ]
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
    """Yield the full names that a parsed module imports, also of attributes. `package`: the folders
    between its file and the root."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # One dot is the package itself, each further one a folder above it.
            parent_folders = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*parent_folders, node.module] if node.module else parent_folders)
            yield from (f"{prefix}.{alias.name}".lstrip(".") for alias in node.names)


def _packages_and_module(root: Path, name: str) -> Iterator[Path]:
    """Yield the paths below `root`, without a suffix, of all that an import of a name such as
    "a.b.c" runs: a, a/b and a/b/c."""
    path = root
    for part in name.split("."):
        path = path / part
        yield path


def _files_of_package_or_module(path: Path, root: Path) -> tuple[Path, ...]:
    """Return the files that exist of the module or package at `path`, such as a/b: a/b.py and
    a/b/__init__.py. Links are resolved if they lead to a file below `root`."""
    files = []
    for file in (path.with_suffix(".py"), path / "__init__.py"):
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
