"""Compare: train short, test long, on the user's own text.

>>> import tempfile
>>> from pathlib import Path
>>> small = {"train_length": 16, "batch": 2, "width": 16, "layers": 1, "heads": 1, "seeds": 1}
>>> with tempfile.TemporaryDirectory() as folder:
...     text, out = Path(folder, "text.txt"), Path(folder, "study")
...     _ = text.write_text("the cat sat on the mat. " * 200)
...     study = posenc.compare.run(
...         ["rope"], text=text, test_lengths=[32], steps=1, out=out, **small
...     )
...     written = sorted(path.name for path in out.glob("[!.]*.*"))
>>> written
['report.html', 'results.csv', 'study.json']
>>> (result,) = study.results
>>> [score.length for score in result.by_length]
[16, 32]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.compare.from_python import run as run
    from posenc.compare.options import Options as Options
    from posenc.compare.results import Study as Study

_PUBLIC = {
    "Options": "posenc.compare.options",
    "Study": "posenc.compare.results",
    "run": "posenc.compare.from_python",
}
# No submodule may have the name of a function here: importing it would replace the function.

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'posenc.compare' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
