"""Extend a trained checkpoint's context: measure, search, tune, export, prove. `run` does it all.

>>> tune = posenc.extend.TuneConfig(steps=400, lora_rank=8)
>>> options = posenc.extend.Options(windows=16, tune=tune)
>>> options.tune.rate(num_parameters=7_000_000_000)  # the learning rate of a model of this size
2e-05
"""

from posenc.lazy import package_hooks as _package_hooks

# No submodule may have the name of a function here: importing it would replace the function.
__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
