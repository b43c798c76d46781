"""Ask installed runtimes what they compute."""

from posenc.dialects.ask.answers import as_computed, row_of
from posenc.dialects.ask.asking import Asked, AskError, Rotation, ask, installed

__all__ = ["AskError", "Asked", "Rotation", "as_computed", "ask", "installed", "row_of"]
