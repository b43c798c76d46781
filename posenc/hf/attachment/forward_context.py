"""Record the running forward of a model with an encoding, and its running attention."""

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from posenc.encodings import PositionEncoding

ATTACHMENT_ATTRIBUTE = "posenc_attachment"
"""Attribute of a model that has its Attachment."""
ENCODING_MODULE = "posenc_encoding"
"""Submodule of a stack that is the encoding, so its parameters are the model's."""
MIXES_TEXTS_ATTRIBUTE = "posenc_mixes_texts"
"""Attribute of a stack: whether layers that are no attention hand one text of a packed row on to
the next."""
NEEDS_POSITION_IDS_ATTRIBUTE = "posenc_needs_position_ids"
"""Attribute of a stack: whether it takes position_ids and keeps its own rotation. It then gets
the positions that posenc has counted, so that both rotate by the same ones."""
HOOKED_MODULES_ATTRIBUTE = "posenc_hooked"
"""Attribute of a stack that has the modules which carry its hooks, and the layers around them, a
list of hooks.HookedModule."""
LAYER_ATTRIBUTE = "posenc_layer"
"""Attribute of an attention module that has the data of its encoding, a hooks.AttachedLayer; None
in one that reads another stack, and has no encoding."""


@dataclass(eq=False)
class RunningForward:
    """Record a running forward of a stack of layers.

    encoding: the stack's encoding, prepared for its positions. positions: (len) or (batch, len),
    plus an axis of components if the encoding takes several; None if the model has none (ViT).
    document_of_token: (len) or (batch, len), the document of each token in a packed row; None if
    there is only one. has_mask: whether the caller gave an attention_mask. reset_token: resets
    RUNNING_FORWARD afterwards.
    """

    stack: nn.Module
    encoding: PositionEncoding
    positions: Tensor | range | None
    document_of_token: Tensor | None = None
    has_mask: bool = False
    reset_token: Any = None


@dataclass(eq=False)
class RunningAttention:
    """Record the call of an attention module that is running now.

    positions and state are those of its queries, kv_positions and kv_state those of its keys: the
    same tokens, until a cache puts earlier ones in front.

    layer: data of the module, a hooks.AttachedLayer. reset_token: resets RUNNING_ATTENTION
    after the call.
    computed_by_posenc: whether posenc's attention has computed it, and not an implementation that
    knows nothing of the encoding.
    """

    module: nn.Module
    running_forward: RunningForward
    encoding: PositionEncoding
    positions: Tensor | range
    state: Tensor | None
    kv_positions: Tensor | range
    kv_state: Tensor | None
    layer: Any
    reset_token: Any = None
    computed_by_posenc: bool = False

    def keep_first_keys(self, length: int) -> None:
        """Keep the positions and states of the first `length` keys, in place."""
        if isinstance(self.kv_positions, range):
            self.kv_positions = self.kv_positions[:length]
        else:
            token_dim = -1 if self.encoding.claims.num_axes == 1 else -2
            self.kv_positions = self.kv_positions.narrow(token_dim, 0, length)
        if self.kv_state is not None:
            self.kv_state = self.kv_state[:, :, :length]


@dataclass(eq=False)
class AttentionCall:
    """Record a call of transformers' attention interface.

    causal: True if no query sees a later key. positions: those of the queries, (len) or (batch,
    len), plus an axis of components if there are several.
    """

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_len: int
    kv_len: int
    causal: bool
    positions: Tensor | range


@dataclass(eq=False)
class AttentionRecord:
    """Collect the attention calls of a trial forward. ignores_mask: True if every token is to see
    every other, whatever the mask hides."""

    ignores_mask: bool = False
    calls: list[AttentionCall] = field(default_factory=list)


CALLED_WITH_POSITION_IDS: ContextVar[bool] = ContextVar("posenc position_ids", default=False)
"""True if the running model was called with position_ids; set for models that may drop them."""
RUNNING_FORWARD: ContextVar[RunningForward | None] = ContextVar("posenc forward", default=None)
RUNNING_ATTENTION: ContextVar[RunningAttention | None] = ContextVar(
    "posenc attention", default=None
)
TRIAL_RECORD: ContextVar[AttentionRecord | None] = ContextVar("posenc trial", default=None)
