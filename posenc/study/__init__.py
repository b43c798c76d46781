"""The old name of posenc.compare, for one release."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

warnings.warn(
    "posenc.study is posenc.compare now; the old name goes with the next release.",
    DeprecationWarning,
    stacklevel=2,
)


def __getattr__(name: str) -> Any:
    return getattr(importlib.import_module("posenc.compare"), name)
