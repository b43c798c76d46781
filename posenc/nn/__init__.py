"""Attention layers of PyTorch and timm with a position encoding and the same weights.

>>> layer = posenc.nn.MultiheadAttention(64, 4, batch_first=True, encoding=posenc.ALiBi(4))
>>> x = torch.randn(2, 9, 64)
>>> layer(x, x, x, need_weights=False)[0].shape
torch.Size([2, 9, 64])
"""

from posenc.nn.torch_layers import MultiheadAttention, TransformerEncoderLayer
from posenc.nn.vision import VisionAttention, attach_to_vit

__all__ = ["MultiheadAttention", "TransformerEncoderLayer", "VisionAttention", "attach_to_vit"]


def __dir__() -> list[str]:
    return __all__
