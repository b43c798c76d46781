"""The contract that every encoding must pass, for your own encodings too.

>>> from posenc import testing
>>> [v.check for v in testing.verdicts(testing.maker("alibi"), testing.CHECKS) if v.failure]
[]
"""

from posenc.lazy import package_hooks as _package_hooks

__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
