"""Extend a trained checkpoint's context: measure, search, tune, export, prove."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.extend.extension import evaluate as evaluate
    from posenc.extend.extension import extend as extend
    from posenc.extend.options import Options as Options
    from posenc.extend.tune.config import TuneConfig as TuneConfig

_PUBLIC = {
    "Options": "posenc.extend.options",
    "TuneConfig": "posenc.extend.tune.config",
    "evaluate": "posenc.extend.extension",
    "extend": "posenc.extend.extension",
}
# No submodule may have the name of a function here: importing it would replace the function.

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'posenc.extend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
