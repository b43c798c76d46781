"""Hugging Face: folders, configs, the attention of a stock model.

>>> from transformers import BloomConfig, BloomModel
>>> from posenc.hf.own_biases import own_biases
>>> stock = BloomModel(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
>>> tokens = torch.arange(10)[None]
>>> expected = stock(tokens).last_hidden_state
>>> with own_biases(stock):  # the same answers, and no bias is written out
...     found = stock(tokens).last_hidden_state
>>> torch.allclose(found, expected, atol=1e-5)
True
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.hf.attachment.attach import attach as attach
    from posenc.hf.attachment.attach import attached as attached
    from posenc.hf.attachment.attach import detach as detach
    from posenc.hf.attachment.attach import shape_of as shape_of
    from posenc.hf.attachment.save import load as load

_ATTACHMENT = {
    **dict.fromkeys(("attach", "attached", "detach", "shape_of"), "attach"),
    "load": "save",
}
_MOVED = ("Options", "TuneConfig", "evaluate", "extend")


def __getattr__(name: str) -> Any:
    if name in _ATTACHMENT:
        module = importlib.import_module(f"posenc.hf.attachment.{_ATTACHMENT[name]}")
        return getattr(module, name)
    if name not in _MOVED:
        raise AttributeError(f"module 'posenc.hf' has no attribute {name!r}")
    import warnings

    import posenc.extend

    warnings.warn(
        f"posenc.hf.{name} is posenc.extend.{name} now; the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(posenc.extend, name)
