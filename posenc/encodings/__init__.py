"""Position encodings, with the names that the rest of posenc imports.

>>> posenc.encodings.RoPE is posenc.RoPE
True
"""

from posenc.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
