"""The state of a running attached model: one forward of its stack, and one attention in it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.encodings import PositionEncoding

ATTACHMENT = "posenc_attachment"
"""The attribute of a model to which an encoding is attached."""
ENCODING = "posenc_encoding"
"""The submodule of a stack under which the encoding's parameters are the model's."""
LAYER = "posenc_layer"
"""The attribute of an attention module that an encoding is attached to."""


@dataclass(eq=False)
class Forward:
    """One forward of a stack of layers.

    encoding: the stack's encoding, prepared for its positions. positions: (len) or (batch, len),
    plus an axis of components if the encoding takes several; None if the model has none (ViT).
    documents: (len) or (batch, len), the document of each token in a packed row; None for one
    document.
    """

    stack: nn.Module
    encoding: PositionEncoding
    positions: Tensor | range | None
    documents: Tensor | None = None
    token: Any = None


@dataclass(eq=False)
class Attending:
    """One attention, from the moment its module is called until it returns.

    Keys are the queries' own tokens until a cache puts earlier ones before them.
    """

    module: nn.Module
    forward: Forward
    encoding: PositionEncoding
    positions: Tensor | range
    state: Tensor | None
    kv_positions: Tensor | range
    kv_state: Tensor | None
    layer: Any
    token: Any = None


@dataclass(eq=False)
class Reached:
    """An attention module that reached the interface, with the sizes of its call."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool


@dataclass(eq=False)
class Trial:
    """A forward that records its attentions. blind: every token sees every other."""

    blind: bool = False
    reached: list[Reached] = field(default_factory=list)


FORWARD: ContextVar[Forward | None] = ContextVar("posenc forward", default=None)
ATTENDING: ContextVar[Attending | None] = ContextVar("posenc attention", default=None)
TRIAL: ContextVar[Trial | None] = ContextVar("posenc trial", default=None)
