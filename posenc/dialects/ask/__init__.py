"""Ask installed runtimes what they compute."""

from posenc.dialects.ask.answers import as_computed, runtime_name_of
from posenc.dialects.ask.asking import Asked, AskError, Rotation, ask, installed_version

__all__ = [
    "AskError",
    "Asked",
    "Rotation",
    "as_computed",
    "ask",
    "installed_version",
    "runtime_name_of",
]
