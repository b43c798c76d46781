"""Measure and draw what an encoding does with position.

>>> from posenc.inspect.encoding.scores import direction
>>> shape = posenc.ModelShape(embed_dim=64, num_heads=4)
>>> direction(posenc.ALiBi(num_heads=4), shape)
'symmetric'
>>> direction(posenc.RoPE(head_dim=16, interleaved=False), shape)
'directed'
>>> (sheet,) = posenc.inspect.run("rope", shape=shape)
>>> sheet.direction, sheet.holds["shift"]
('directed', True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.inspect.from_python import run as run

_PUBLIC = {"run": "posenc.inspect.from_python"}
# No submodule may have the name of a function here: importing it would replace the function.

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'posenc.inspect' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
