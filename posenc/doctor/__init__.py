"""`posenc doctor`: say what every runtime computes from a checkpoint's positions, and write a fix.

>>> config = {"model_type": "llama", "head_dim": 128, "rope_theta": 5e5}
>>> answer = posenc.doctor.ask(config)  # the transformers that is installed here
>>> len(answer.rotations[0].inv_freq)  # radians per token, one for each pair of channels
64
"""

from posenc.lazy import package_hooks as _package_hooks

# No submodule may have the name of a function here: importing it would replace the function.
__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
