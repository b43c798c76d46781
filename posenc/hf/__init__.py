"""Hugging Face checkpoints: read, extend, measure and export their positions."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.hf.extension import evaluate as evaluate
    from posenc.hf.extension import extend as extend
    from posenc.hf.options import Options as Options
    from posenc.hf.tune import TuneConfig as TuneConfig

_PUBLIC = {
    "Options": "posenc.hf.options",
    "TuneConfig": "posenc.hf.tune",
    "evaluate": "posenc.hf.extension",
    "extend": "posenc.hf.extension",
}
# No submodule may have the name of a function here: importing it would replace the function.

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'posenc.hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
