"""Ask installed runtimes what they compute."""

from posenc.runtimes.ask.answers import (
    Asked,
    Rotation,
    as_computed,
    as_loaded,
    runtime_name_of,
)
from posenc.runtimes.ask.interpreters import (
    PROBES,
    AskError,
    ask,
    installed_version,
    runtimes_of,
)

__all__ = [
    "PROBES",
    "AskError",
    "Asked",
    "Rotation",
    "as_computed",
    "as_loaded",
    "ask",
    "installed_version",
    "runtime_name_of",
    "runtimes_of",
]
