"""Hash the source files of a user's encoding, so that results of an edited one are not reused."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from posenc.encodings.registry.build import class_of_part
from posenc.encodings.registry.grammar import parse


def files_of(cls: type) -> tuple[Path, ...]:
    """Return the file of a class and the files next to it that it imports, directly or indirectly.
    Return () for posenc's own classes."""
    module = sys.modules[cls.__module__]
    found = getattr(module, "__file__", None)
    if cls.__module__.partition(".")[0] == "posenc" or found is None:
        return ()
    start = Path(found).resolve()
    depth = cls.__module__.count(".") + (start.name == "__init__.py")
    return tuple(sorted(_with_imports(start, start.parents[depth])))


def code_of(text: str) -> str:
    """Hash the source files of the encodings that a text names; "" if all are posenc's own."""
    spec = parse(text)
    return hash_of([class_of_part(spec, part) for part in spec.parts])


def hash_of(classes: Iterable[type]) -> str:
    """Return twelve hexadecimal digits of the classes' source files; "" if all are posenc's own."""
    files = dict.fromkeys(file for cls in classes for file in files_of(cls))
    if not files:
        return ""
    digests = [hashlib.sha256(_bytes(file)).hexdigest() for file in files]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def _with_imports(start: Path, root: Path) -> set[Path]:
    """Return the file and all files below `root` that it imports, directly or indirectly; among
    installed packages only files of its own package."""
    installed = {Path(sysconfig.get_path(n)).resolve() for n in ("purelib", "platlib", "stdlib")}
    own = start.relative_to(root).parts[0] if root in installed else None
    found, waiting = set(), [start]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found.add(file)
        package = file.relative_to(root).parent.parts
        for name in _imported(_bytes(file), package):
            if own is None or name.partition(".")[0] == own.removesuffix(".py"):
                waiting += _modules(root, name.split("."))
    return found


def _imported(source: bytes, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the full names of modules that a file may import."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{start}.{alias.name}".lstrip(".") for alias in node.names)


def _modules(root: Path, names: list[str]) -> Iterator[Path]:
    """Yield the files below `root` that an import of a.b.c runs."""
    for depth in range(1, len(names) + 1):
        place = root.joinpath(*names[:depth])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file.resolve() if file.resolve().is_relative_to(root) else file


def _bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # deleted after it was imported
        return b""
