"""Look up encodings by name, and parse the texts that name them in every command.

>>> posenc.encodings.registry.entry("alibi").class_path
'posenc.encodings.scores.alibi:ALiBi'
>>> posenc.encodings.registry.encoding_class("alibi") is posenc.ALiBi
True
"""

from posenc.lazy import package_hooks as _package_hooks

__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
