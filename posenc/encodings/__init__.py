"""Position encodings, with the names that the rest of posenc imports.

>>> posenc.encodings.RoPE is posenc.RoPE
True
"""

from posenc.lazy import package_hooks as _package_hooks

__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
