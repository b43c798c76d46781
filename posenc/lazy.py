"""Import the public names of a package on first use.

They are listed once, as imports in the package's stub `__init__.pyi`, for type checkers too.
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EXTRAS = {"transformers": "hf", "gguf": "doctor", "keras": "keras", "lm_eval": "lm-eval"}
_EXTRAS |= {"ray": "ray", "submitit": "slurm", "s3fs": "storage", "tensorboard": "tensorboard"}
_EXTRAS |= dict.fromkeys("torch numpy scipy matplotlib safetensors jaxtyping".split(), "torch")
"""The extra of posenc that installs a package. Without extras it needs only typer and rich."""


def hint(error: ModuleNotFoundError) -> str:
    """Return the pip command that installs the missing package; "" if it is not posenc's."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return ""
    return f'{package} is not installed: pip install "posenc[{_EXTRAS[package]}]"'


def require(package: str, option: str) -> None:
    """Raise ValueError if a package that an option needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{option}: {hint(ModuleNotFoundError(name=package))}")


def listed(file: str) -> dict[str, str]:
    """Map each name that the stub next to `file` imports to its module.

    >>> listed(posenc.compare.__file__)["Study"]
    'posenc.compare.results'
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package with a stub."""
    public = listed(file)

    def load(name: str) -> Any:
        if name in public:
            found = importlib.import_module(public[name])
            # A name may be a module of a package that has not imported it.
            return vars(found).get(name) or importlib.import_module(f"{public[name]}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return load, names, sorted(public)
