"""Names of encodings, and the grammar by which every command reads them.

>>> posenc.encodings.registry.entry("alibi").path
'posenc.encodings.scores.alibi:ALiBi'
>>> posenc.encodings.registry.encoding_class("alibi") is posenc.ALiBi
True
"""

from posenc.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
