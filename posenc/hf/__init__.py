"""Hugging Face: folders, configs, the attention of a stock model."""

from __future__ import annotations

from typing import Any

_MOVED = ("Options", "TuneConfig", "evaluate", "extend")


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module 'posenc.hf' has no attribute {name!r}")
    import warnings

    import posenc.extend

    warnings.warn(
        f"posenc.hf.{name} is posenc.extend.{name} now; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(posenc.extend, name)
