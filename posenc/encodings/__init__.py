"""Position encodings, with the names that the rest of posenc imports.

>>> posenc.encodings.RoPE is posenc.RoPE
True
"""

from posenc.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
