"""Entropy of attention, read through transformers' attention interface without keeping any
weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 256
"""Queries at a time."""


@torch.inference_mode()
def attention_entropy(model: Any, tokens: Tensor) -> Tensor | None:
    """Mean entropy in nats of each position's attention over layers and heads, (length); None where
    the model's attention does not go through the interface, or has sinks or soft caps."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    totals: list[Tensor] = []

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
            raise ValueError("sinks and soft caps would change the weights")
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        out, entropy = (
            torch.empty_like(query[..., : value.shape[-1]]),
            query.new_zeros(query.shape[2]),
        )
        for start in range(0, query.shape[2], BLOCK):
            rows = slice(start, start + BLOCK)
            scores = query[:, :, rows] @ key.mT * scale
            if attention_mask is not None:
                scores = scores + attention_mask[:, :, rows, : key.shape[2]]
            weights = scores.float().softmax(-1)
            entropy[rows] = torch.special.entr(weights).sum(-1).mean((0, 1))
            out[:, :, rows] = weights.to(value.dtype) @ value
        totals.append(entropy)
        return out.transpose(1, 2).contiguous(), None

    name, before = "posenc_entropy", model.config._attn_implementation
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        model.set_attn_implementation(name)
        model(tokens)
    except ValueError:
        return None
    finally:
        model.set_attn_implementation(before)
    return torch.stack(totals).mean(0) if totals else None
