"""Hash the source files of a user's encoding, so that results of an edited one are not reused."""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from posenc.encodings.registry.build import class_of_part
from posenc.encodings.registry.code import MODULE, imported
from posenc.encodings.registry.grammar import parse
from posenc.encodings.registry.known import entry
from posenc.encodings.registry.spec import Part, Spec

_POSENC = Path(__file__).resolve().parents[2]


def files_of(module: str) -> tuple[Path, ...]:
    """Return the file of a module and the files next to it that it imports, also indirectly."""
    found = getattr(sys.modules.get(module), "__file__", None)
    if found is None:
        return ()
    start = Path(found).resolve()
    depth = (not module.startswith(MODULE)) * module.count(".") + (start.name == "__init__.py")
    return tuple(sorted(_with_imports(start, start.parents[depth])))


def code_of(text: str) -> str:
    """Hash the source files of the encodings that a text names; "" if all are posenc's own."""
    spec = parse(text)
    return hash_of([module for part in spec.parts for module in _modules_of(spec, part)])


def _modules_of(spec: Spec, part: Part) -> list[str]:
    """Return the module of a part's class, and the one that the part names, which may make it."""
    named = [imported(part.where).__name__] if part.attribute else []
    return [class_of_part(spec, part).__module__, *named]


def source_of(text: str) -> str:
    """Hash posenc's current files behind an encoding, and the options that are registered with it.

    A class outside posenc may use any encoding of posenc, so it counts all of them.
    """
    spec, digests = parse(text), []
    for part in spec.parts:
        found = _modules_of(spec, part)
        own = all(map(_is_posencs, found))
        files = files_of(found[0]) if own else sorted((_POSENC / "encodings").rglob("*.py"))
        options = {} if part.attribute else entry(part.where).defaults
        digests.append(_hash(files) + repr(sorted(options.items())))
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def hash_of(modules: Iterable[str]) -> str:
    """Hash the source files of modules to twelve digits; "" if all are posenc's own."""
    files = dict.fromkeys(f for each in modules if not _is_posencs(each) for f in files_of(each))
    return _hash(files) if files else ""


def _is_posencs(module: str) -> bool:
    return module.partition(".")[0] == "posenc"


def _hash(files: Iterable[Path]) -> str:
    digests = [hashlib.sha256(_bytes(file)).hexdigest() for file in files]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:12]


def _with_imports(start: Path, root: Path) -> set[Path]:
    """Return the file and the files below `root` or on PYTHONPATH that it imports, also
    indirectly; among installed packages only files of its own package."""
    ours = start.is_relative_to(_POSENC)
    installed = {Path(sysconfig.get_path(n)).resolve() for n in ("purelib", "platlib", "stdlib")}
    own = start.relative_to(root).parts[0] if root in installed else None
    path = "" if own or ours else os.environ.get("PYTHONPATH", "")
    places = [p for p in path.split(os.pathsep) if p and "-packages" not in p]  # not installed ones
    roots = [root, *(Path(place).resolve() for place in places)]
    found, waiting = set(), [(start, root)]
    while waiting:
        file, above = waiting.pop()
        if file in found or (file.resolve().is_relative_to(_POSENC) and not ours):
            continue  # posenc's own files, from a copy on PYTHONPATH, are not the user's
        found.add(file)
        package = file.relative_to(above).parent.parts
        for name in _names(_bytes(file), package):
            if own is None or name.partition(".")[0] == own.removesuffix(".py"):
                waiting += [(f, each) for each in roots for f in _modules(each, name.split("."))]
    return found


@lru_cache(maxsize=512)
def _names(source: bytes, package: tuple[str, ...]) -> tuple[str, ...]:
    """Return the full names of modules that a file may import."""
    try:
        return tuple(_imports(ast.parse(source), package))
    except (SyntaxError, ValueError):
        return ()


def _imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the full names that a module of `package` imports."""
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
