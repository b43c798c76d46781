"""Names of encodings, and the grammar by which every command reads them.

>>> posenc.encodings.registry.entry("alibi").path
'posenc.encodings.scores.alibi:ALiBi'
>>> posenc.encodings.registry.encoding_class("alibi") is posenc.ALiBi
True
"""

from posenc.encodings.registry.build import create, encoding_class
from posenc.encodings.registry.entries import Entry
from posenc.encodings.registry.grammar import parse
from posenc.encodings.registry.known import entry, names, problems, register
from posenc.encodings.registry.spec import Spec, SpecError

__all__ = [
    "Entry", "Spec", "SpecError", "create", "encoding_class", "entry", "names", "parse",
    "problems", "register",
]  # fmt: skip
