"""The contract that every encoding is held to, for encodings of your own.

>>> from posenc import testing
>>> [v.check for v in testing.verdicts(testing.maker("alibi"), testing.CHECKS) if v.failure]
[]
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.testing.as_pytest import test_contract as test_contract
    from posenc.testing.checks import CHECKS as CHECKS
    from posenc.testing.checks import VOIDING as VOIDING
    from posenc.testing.checks import Verdict as Verdict
    from posenc.testing.checks import every_check as every_check
    from posenc.testing.checks import maker as maker
    from posenc.testing.checks import verdicts as verdicts

_PUBLIC = {
    "CHECKS": "posenc.testing.checks",
    "VOIDING": "posenc.testing.checks",
    "Verdict": "posenc.testing.checks",
    "every_check": "posenc.testing.checks",
    "maker": "posenc.testing.checks",
    "test_contract": "posenc.testing.as_pytest",
    "verdicts": "posenc.testing.checks",
}

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'posenc.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
