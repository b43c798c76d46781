"""Extend a trained checkpoint's context: measure, search, tune, export, prove.

>>> import tempfile
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
>>> shape = LlamaConfig(vocab_size=256, max_position_embeddings=64, **small)
>>> few = posenc.extend.Options(windows=2, search_evaluations=0)
>>> texts = ["Documents of your own, longer than the new length. " * 9] * 4
>>> with tempfile.TemporaryDirectory() as folder:  # a checkpoint that has learned nothing
...     LlamaForCausalLM(shape).save_pretrained(folder)
...     outcome = posenc.extend.run(
...         folder, 128, texts, method="yarn", as_bytes=True, options=few
...     )
>>> list(outcome.measured)  # as it is, stretched, and with a window of the trained length
['none', 'yarn', 'window']
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posenc.extend.extension import Outcome as Outcome
    from posenc.extend.extension import evaluate as evaluate
    from posenc.extend.extension import extend as extend
    from posenc.extend.from_python import run as run
    from posenc.extend.options import Options as Options
    from posenc.extend.tune.config import TuneConfig as TuneConfig

_PUBLIC = {
    "Options": "posenc.extend.options",
    "Outcome": "posenc.extend.extension",
    "TuneConfig": "posenc.extend.tune.config",
    "evaluate": "posenc.extend.extension",
    "extend": "posenc.extend.extension",
    "run": "posenc.extend.from_python",
}
# No submodule may have the name of a function here: importing it would replace the function.

__all__ = sorted(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'posenc.extend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
