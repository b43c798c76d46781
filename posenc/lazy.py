"""Import the public names of a package on first use.

The names are listed once, as imports in the package's stub `__init__.pyi`, which type checkers read
too.
"""

import ast
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

EXTRA_BY_PACKAGE = {"numpy": "doctor", "keras": "keras"}
EXTRA_BY_PACKAGE |= dict.fromkeys(("torch", "safetensors", "jaxtyping"), "torch")
EXTRA_BY_PACKAGE |= dict.fromkeys(("transformers", "scipy", "matplotlib"), "hf")
EXTRA_BY_PACKAGE |= dict.fromkeys(("ray", "submitit", "s3fs", "tensorboard"), "cluster")
"""Extra of posenc that installs a package, by the package. Without extras posenc needs only typer
and rich."""
_EXTRAS_FROM_SMALL_TO_LARGE = ("doctor", "torch", "hf")
"""Extras of which each one installs all packages that the extras before it install."""
_ROOT = Path(__file__).parents[1]
"""Folder that contains the folder posenc."""
OLDEST_TORCH = [2, 6]
"""Oldest release of torch that works, as in pyproject.toml. It is checked at run time, because a
torch that another package installed may be older."""


def install_hint(error: ModuleNotFoundError, needed_extra: str = "torch") -> str:
    """Return a sentence with the pip command that installs the missing package; "" if it is none
    that an extra of posenc installs.

    Args:
        error: the error that names the missing package.
        needed_extra: extra that the command needs anyway. If it installs the package too, it is
            named, so that one installation is enough.

    ModuleNotFoundError(name="torch") -> 'torch is not installed: pip install "posenc[torch]"'
    """
    package = (error.name or "").partition(".")[0]
    if package not in EXTRA_BY_PACKAGE:
        return ""
    extra = EXTRA_BY_PACKAGE[package]
    if extra in _EXTRAS_FROM_SMALL_TO_LARGE:
        extra = max(extra, needed_extra, key=_EXTRAS_FROM_SMALL_TO_LARGE.index)
    return f'{package} is not installed: pip install "posenc[{extra}]"'


def require_package(package: str, option: str) -> None:
    """Raise ValueError if `package` is not installed; the message names `option`, which needs
    it."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{option}: {install_hint(ModuleNotFoundError(name=package))}")


@functools.cache
def installed_version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    from importlib import metadata  # half of what `import posenc` would take

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def load_module(module: str) -> ModuleType:
    """Import a module of posenc. Raises ImportError if torch is installed and too old."""
    torch_version = installed_version("torch")
    if torch_version and [int(part) for part in torch_version.split(".")[:2]] < OLDEST_TORCH:
        oldest_version = ".".join(map(str, OLDEST_TORCH))
        command = 'pip install --upgrade "posenc[torch]"'
        raise ImportError(
            f"posenc needs torch {oldest_version} or newer, found {torch_version}: {command}"
        )
    return importlib.import_module(module)


def modules_by_stub_name(file: str) -> dict[str, str]:
    """Return the module from which the stub of a package imports each name, by that name. file: the
    package's __init__.py, next to which the stub is.

    >>> modules_by_stub_name(posenc.compare.__file__)["Study"]
    'posenc.compare.results'
    """
    return _modules_by_imported_name(Path(file).with_suffix(".pyi"))


def _modules_by_imported_name(file: Path) -> dict[str, str]:
    """Return the module from which a file imports each name, by that name. A star import is
    replaced by the imports of the module that it names."""
    modules: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        for alias in node.names:
            if alias.name == "*":
                # `find_spec` would import the packages around the module.
                starred_file = _ROOT.joinpath(*str(node.module).split(".")).with_suffix(".py")
                modules |= _modules_by_imported_name(starred_file)
            else:
                modules[alias.name] = str(node.module)
    return modules


def names_for_dir(module: str, public: Iterable[str]) -> list[str]:
    """Return the names that `dir` lists of a module: its public names, and Python's own such as
    __doc__, but not what the module imports for itself."""
    python_names = [name for name in vars(sys.modules[module]) if name.startswith("__")]
    return sorted({*python_names, *public})


def package_hooks(
    package: str, file: str, new_name_by_old: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package with a stub.

    package: its name, such as "posenc.hf". file: its __init__.py, next to which the stub is.
    new_name_by_old: by each former name the name to write now, for the error message.
    """
    module_by_name = modules_by_stub_name(file)

    def getattribute(name: str) -> Any:
        """Import a public name; raise AttributeError for others."""
        if name in module_by_name:
            found_module = load_module(module_by_name[name])
            # A name may be a module of a package that has not imported it.
            return vars(found_module).get(name) or load_module(f"{module_by_name[name]}.{name}")
        if new_name_by_old is not None and name in new_name_by_old:
            raise AttributeError(
                f"{package}.{name} is gone: use {package}.{new_name_by_old[name]}."
            )
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        """Return what `dir` lists of the package."""
        return names_for_dir(package, module_by_name)

    return getattribute, list_names, sorted(module_by_name)
