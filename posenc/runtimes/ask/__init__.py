"""Ask installed runtimes what they compute."""

from posenc.runtimes.ask.answers import (
    Rotation,
    RuntimeAnswer,
    as_computed,
    as_loaded,
    runtime_name_of,
)
from posenc.runtimes.ask.interpreters import (
    PROBES,
    AskError,
    ask,
    installed_runtime_version,
    runtimes_of,
)

__all__ = [
    "PROBES",
    "AskError",
    "Rotation",
    "RuntimeAnswer",
    "as_computed",
    "as_loaded",
    "ask",
    "installed_runtime_version",
    "runtime_name_of",
    "runtimes_of",
]
