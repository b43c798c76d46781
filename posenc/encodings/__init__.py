"""Position encodings: the names that the folders above import.

>>> posenc.encodings.RoPE is posenc.RoPE
True
"""

from posenc.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
