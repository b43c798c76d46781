"""Hugging Face: load folders, read and write rope configs, attach encodings to stock models.

>>> from transformers import BloomConfig, BloomModel
>>> from posenc.hf.own_biases import own_biases
>>> stock = BloomModel(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
>>> tokens = torch.arange(10)[None]
>>> expected = stock(tokens).last_hidden_state
>>> with own_biases(stock):  # the same results, without materializing a bias
...     found = stock(tokens).last_hidden_state
>>> torch.allclose(found, expected, atol=1e-5)
True
"""

from __future__ import annotations

from typing import Any

from posenc import lazy

_MOVED = ("Options", "TuneConfig", "evaluate", "extend")

_load, __dir__, __all__ = lazy.attach(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        return _load(name)
    import warnings

    import posenc.extend

    warnings.warn(
        f"posenc.hf.{name} is posenc.extend.{name} now; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(posenc.extend, name)
