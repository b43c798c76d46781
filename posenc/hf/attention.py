"""Run a stock transformers model on posenc's attention: any encoding, in memory that grows with the
length only, not with its square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posenc.attend.attention import attention
from posenc.encoding.base import PositionEncoding
from posenc.hf.apply import rotary_modules
from posenc.masks import Mask, causal

NAME = "posenc"


def register_attention(name: str = NAME) -> None:
    """Make `attn_implementation=name` known to transformers: attention and its masks.

    A module takes its encoding from `module.posenc_encoding`, which `attached` sets; without one it
    attends without positions of its own, which is right for a model whose q and k arrive rotated.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    # Without a mask function of its own, transformers would drop padding without a word.
    AttentionMaskInterface.register(name, lazy_mask)


@dataclass(frozen=True)
class LazyMask:
    """A mask of transformers that is asked block by block and never written out."""

    allowed: Callable[..., Tensor]
    """(batch, head, query, key), all as indices -> bool."""
    q_offset: int
    kv_offset: int


def lazy_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **options: Any,
) -> LazyMask | Tensor | None:
    """What transformers asks for in place of a mask: None for plain causal attention or none."""
    from transformers import masking_utils as theirs

    if use_vmap:  # somebody's own mask, which may not take indices that broadcast
        return theirs.sdpa_mask(
            q_length=q_length, kv_length=kv_length, mask_function=mask_function,
            q_offset=q_offset, kv_offset=kv_offset, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip, use_vmap=True, **options,
        )  # fmt: skip
    padding = theirs.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None or bool(padding.all()):
        causal_only = mask_function is theirs.causal_mask_function and q_length == kv_length
        if mask_function is theirs.bidirectional_mask_function or (
            causal_only and allow_is_causal_skip
        ):
            return None
    else:
        mask_function = theirs.and_masks(mask_function, theirs.padding_mask_function(padding))
    return LazyMask(mask_function, q_offset, kv_offset)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LazyMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (batch, heads, len, head_dim) in, (batch, len, heads,
    head_dim) out."""
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
        raise ValueError("posenc attention: soft-capped scores and sink logits are not supported.")
    bias = kwargs.get("position_bias")
    if bias is not None and bias.numel():
        raise ValueError(
            "posenc attention: a dense position_bias came in; attach an encoding instead."
        )
    q_positions, kv_positions = _positions(query.shape[2], key.shape[2], position_ids, query.device)
    encoding: PositionEncoding = getattr(module, "posenc_encoding", None) or PositionEncoding()
    if scaling is not None:
        # The model has its own scale; the host's comes from the encoding.
        query = query * (scaling / encoding.scale(query.shape[-1]))
    out = attention(
        query, key, value, encoding, q_positions=q_positions, kv_positions=kv_positions,
        mask=_mask(module, attention_mask, query.shape[2], q_positions, kv_positions),
        dropout_p=dropout if module.training else 0.0,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _positions(
    q_len: int, kv_len: int, position_ids: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions of queries and of all keys: cached keys count back from the first query, row by
    row."""
    if position_ids is None:
        first = kv_len - q_len  # below 0 where a long text reads a short one by cross-attention
        return torch.arange(first, kv_len, device=device), torch.arange(kv_len, device=device)
    q = position_ids[0] if position_ids.shape[0] == 1 else position_ids
    if q_len == kv_len:
        return q, q
    earlier = q[..., :1] + torch.arange(q_len - kv_len, 0, device=device)
    return q, torch.cat([earlier, q], dim=-1)


def _mask(
    module: nn.Module,
    attention_mask: LazyMask | Tensor | None,
    q_len: int,
    q_positions: Tensor,
    kv_positions: Tensor,
) -> Mask | None:
    if attention_mask is None:
        return causal if getattr(module, "is_causal", True) and q_len > 1 else None
    if isinstance(attention_mask, LazyMask):
        lazy = attention_mask
        return Mask(
            lambda sight: lazy.allowed(
                sight.batch, sight.head, sight.q_idx + lazy.q_offset, sight.kv_idx + lazy.kv_offset
            )
        ).bind(q_positions, kv_positions)
    allowed = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    dense = Mask(lambda sight: allowed[sight.batch, 0, sight.q_idx, sight.kv_idx])
    return dense.bind(q_positions, kv_positions)


class Unrotated(nn.Module):
    """Stands in for a model's rotary module, so that q and k reach attention as they were
    projected: the module's own cosines and sines, in its own shape, become ones and zeros."""

    def __init__(self, rotation: nn.Module) -> None:
        super().__init__()
        self.rotation = rotation

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        return no_turn(self.rotation(*args, **kwargs))


def no_turn(turn: Tensor | tuple[Tensor, Tensor]) -> Tensor | tuple[Tensor, Tensor]:
    """The rotation by nothing, in the shape of a rotary module's output."""
    if isinstance(turn, Tensor):  # cosine + i sine
        return torch.ones_like(turn)
    cos, sin = turn
    return torch.ones_like(cos), torch.zeros_like(sin)


def exchangeable(model: Any) -> bool:
    """Whether the model's attention can become posenc's. Where its code does not go through the
    interface (Falcon), transformers ignores the wish and raises nothing."""
    register_attention()
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    taken = model.config._attn_implementation == NAME
    model.set_attn_implementation(before)
    return taken


@contextmanager
def attached(model: Any, encoding: Callable[[int], PositionEncoding]) -> Iterator[nn.Module]:
    """The model with encoding(layer) in place of its own rotation, inside the block.

    Keys are cached as they were projected, so that position maps may rotate them anew.
    Raises: ValueError where the model has no rotary module or its attention does not go through the
    interface.
    """
    rotary = rotary_modules(model)
    layers = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    if not rotary or not layers:
        raise ValueError("the model has no rotary module that could be replaced")
    if not exchangeable(model):
        raise ValueError(
            f"the attention of {type(model).__name__} cannot be exchanged: transformers has it "
            "outside its attention interface"
        )
    before = model.config._attn_implementation
    try:
        for parent, name, child in rotary:
            setattr(parent, name, Unrotated(child))
        for layer in layers:
            layer.posenc_encoding = encoding(layer.layer_idx)
        model.set_attn_implementation(NAME)
        yield model
    finally:
        model.set_attn_implementation(before)
        for parent, name, child in rotary:
            setattr(parent, name, child)
        for layer in layers:
            if hasattr(layer, "posenc_encoding"):
                del layer.posenc_encoding
