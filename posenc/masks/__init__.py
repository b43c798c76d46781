"""Attention masks: which keys each query sees. Masks can be combined by &, | and ~.

With positions of several components (M-RoPE, rows and columns) masks compare the order in memory:
queries are the last tokens.

>>> mask = posenc.masks.causal & posenc.masks.sliding_window(2)
>>> mask.tensor(4).int()
tensor([[1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1]], dtype=torch.int32)
"""

from posenc.masks.kinds import (
    attention_sinks,
    causal,
    chunked,
    document,
    full,
    padding,
    permutation,
    prefix,
    sliding_window,
    windows,
)
from posenc.masks.mask import Mask

__all__ = [
    "Mask",
    "attention_sinks",
    "causal",
    "chunked",
    "document",
    "full",
    "padding",
    "permutation",
    "prefix",
    "sliding_window",
    "windows",
]


def __dir__() -> list[str]:
    return __all__
