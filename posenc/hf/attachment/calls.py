"""What is known while an attached model runs: one forward of its stack, and one attention in it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.encoding.base import PositionEncoding

ATTACHMENT = "posenc_attachment"
"""The attribute of a model to which an encoding is attached."""
ENCODING = "posenc_encoding"
"""The submodule of a stack under which the encoding's parameters are the model's."""
LAYER = "posenc_layer"
"""The attribute of an attention module that an encoding is attached to."""


@dataclass(eq=False)
class Forward:
    """One forward of a stack of layers.

    encoding: the stack's, prepared for its positions. positions: (len) or (batch, len), plus an
    axis of components where the encoding takes several; None where the model is told none (ViT).
    documents: (len) or (batch, len), which document of a packed row a token belongs to; None where
    there is one.
    """

    stack: nn.Module
    encoding: PositionEncoding
    positions: Tensor | None
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
    positions: Tensor
    state: Tensor | None
    kv_positions: Tensor
    kv_state: Tensor | None
    layer: Any
    token: Any = None


@dataclass(eq=False)
class Reached:
    """An attention module that arrived at the interface, and the sizes it came with."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool


@dataclass(eq=False)
class Trial:
    """A forward that is watched. `blind`: every token sees every other."""

    blind: bool = False
    reached: list[Reached] = field(default_factory=list)


FORWARD: ContextVar[Forward | None] = ContextVar("posenc forward", default=None)
ATTENDING: ContextVar[Attending | None] = ContextVar("posenc attention", default=None)
TRIAL: ContextVar[Trial | None] = ContextVar("posenc trial", default=None)
