"""The contract that every encoding must pass, for your own encodings too.

>>> from posenc import testing
>>> [v.check for v in testing.verdicts(testing.maker("alibi"), testing.CHECKS) if v.failure]
[]
"""

from posenc.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
