"""Compare encodings: train short, test long, on the user's own text. `run` does it all.

>>> options = posenc.compare.Options(["rope", "alibi"], train_length=64)
>>> options.budget, options.engine
('standard', 'local')
"""

from posenc.lazy import package_hooks as _package_hooks

# No submodule may have the name of a function here, because importing it would replace it.
__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
