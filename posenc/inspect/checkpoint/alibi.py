"""ALiBi as transformers' families build it: BLOOM and MPT, each with a method of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def alibi_by_distance(model: Any, length: int) -> Tensor | None:
    """The bias in logits, (heads, length), against the key at the query's own position; None for
    a model without one.

    Raises: ValueError for Falcon with ALiBi, whose bias transformers (5.23) counts twice in the
        eager implementation, the only one that shows attention: in the mask and in the scores.
    """
    if model.config.model_type == "falcon" and model.config.alibi:
        raise ValueError(
            "Falcon with ALiBi: transformers counts its bias twice where it shows attention, so "
            "what could be drawn here is not what the model does."
        )
    heads = model.config.num_attention_heads
    for module in model.modules():
        if hasattr(module, "build_alibi_tensor"):
            row = module.build_alibi_tensor(torch.ones(1, length), heads, torch.float32)
        elif hasattr(module, "build_mpt_alibi_tensor"):
            row = module.build_mpt_alibi_tensor(heads, length)
        else:
            continue
        row = row.view(heads, length)
        return (row - row[:, -1:]).flip(-1)
    return None
