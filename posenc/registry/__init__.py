"""The names of encodings, and the grammar in which every command reads them.

>>> posenc.registry.entry("alibi").path
'posenc.scores.alibi:ALiBi'
>>> posenc.registry.encoding_class("alibi") is posenc.ALiBi
True
"""

from posenc.registry.build import create, encoding_class
from posenc.registry.entries import Entry
from posenc.registry.grammar import parse
from posenc.registry.known import entry, names, problems, register
from posenc.registry.spec import Spec, SpecError

__all__ = [
    "Entry", "Spec", "SpecError", "create", "encoding_class", "entry", "names", "parse",
    "problems", "register",
]  # fmt: skip
