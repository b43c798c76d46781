"""Hugging Face: load checkpoints, read and write RoPE settings, attach encodings to stock models.

>>> from transformers import BloomConfig, BloomModel
>>> stock = BloomModel(BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)).eval()
>>> tokens = torch.arange(10)[None]
>>> expected = stock(tokens).last_hidden_state
>>> with posenc.hf.attached(stock, posenc.PositionEncoding(), model_positions="keep"):
...     hidden = stock(tokens).last_hidden_state  # with BLOOM's bias, and no other encoding
>>> torch.allclose(hidden, expected, atol=1e-5)
True
"""

from posenc.lazy import package_hooks as _package_hooks

__getattr__, __dir__, __all__ = _package_hooks(__name__, __file__)
