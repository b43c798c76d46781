"""The contract that every encoding is held to, for encodings of your own.

>>> from posenc import testing
>>> [v.check for v in testing.verdicts(testing.maker("alibi"), testing.CHECKS) if v.failure]
[]
"""

from posenc.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
