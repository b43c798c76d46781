"""Emulate what each runtime computes from a checkpoint's position settings; read and write configs.

known/ computes by recorded facts, ask/ asks an installed runtime, files/ reads checkpoints, and
writers/ changes them. Nothing here loads torch or transformers. A config takes milliseconds.

>>> posenc.runtimes.frequencies({"model_type": "llama", "head_dim": 4})["kinds"][0]["inv_freq"]
[1.0, 0.01]
"""

from posenc.lazy import package_hooks as _package_hooks

__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
