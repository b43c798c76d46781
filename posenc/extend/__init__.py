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
>>> list(outcome.measured)  # as it is, stretched, and with a window of the training length
['none', 'yarn', 'window']
"""

from posenc.lazy import attach

# No submodule may have the name of a function here: importing it would replace the function.
__getattr__, __dir__, __all__ = attach(__name__, __file__)
