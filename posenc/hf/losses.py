"""Loss of every token, in nats, in memory that does not grow with the vocabulary times the
length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LOGITS_BUDGET = 1 << 26
"""Logits held at once; a longer window is read in pieces through the model's cache."""


@torch.inference_mode()
def next_token_losses(model: Any, tokens: Tensor, *, whole: bool = False) -> Tensor:
    """Loss of tokens[:, 1:] given all before, (batch, length - 1).

    `whole` reads a window in one piece whatever its size, for methods whose cache is not exact.
    """
    batch, length = tokens.shape
    vocab = model.config.vocab_size
    piece = max(128, LOGITS_BUDGET // (batch * vocab))
    if whole or length <= piece:
        logits = model(tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.float().mT, tokens[:, 1:], reduction="none")
    cache, losses = None, []
    for start in range(0, length - 1, piece):
        out = model(tokens[:, start : start + piece], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        targets = tokens[:, start + 1 : start + piece + 1]
        losses.append(
            F.cross_entropy(out.logits[:, : targets.shape[1]].float().mT, targets, reduction="none")
        )
    return torch.cat(losses, dim=1)


@torch.inference_mode()
def masked_token_losses(
    model: Any, tokens: Tensor, mask_token: int, *, share: float = 0.15, seed: int = 0
) -> Tensor:
    """Loss of a random share of the tokens, each replaced by the mask token; NaN for the others,
    (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(tokens.shape, generator=generator) < share
    logits = model(tokens.masked_fill(hidden, mask_token)).logits
    losses = F.cross_entropy(logits.float().mT, tokens, reduction="none")
    return losses.masked_fill(~hidden, torch.nan)
