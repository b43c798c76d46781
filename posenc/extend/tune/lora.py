"""Low-rank adapters on a model's attention projections, merged into the weights when done."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "qkv_proj",
    "query_key_value",
    "dense",
    "c_attn",
)
"""What the attention projections are called over the families."""


class LoRALinear(nn.Module):
    """y = W x + (alpha / rank) B A x with W frozen, A random and B zero, so that it starts as W.

    Source: Hu et al. 2021, arXiv:2106.09685, section 4.1; LongLoRA, arXiv:2309.12307, for context
    extension.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.down = nn.Parameter(torch.empty(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T @ self.up.T) * self.scale

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        self.base.weight += self.up @ self.down * self.scale
        return self.base


def add_lora(model: nn.Module, rank: int = 8, alpha: float = 16.0) -> int:
    """Freeze the model but for adapters on its attention projections, embeddings and norms (as
    LongLoRA does); how many parameters train.

    Raises: ValueError where no projection is found.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in name or "norm" in name.lower())
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name in PROJECTIONS
    ]
    if not found:
        raise ValueError(
            f"LoRA: found none of {', '.join(PROJECTIONS)}; tune the full model instead."
        )
    for parent, name, child in found:
        setattr(parent, name, LoRALinear(child, rank, alpha))
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def merge_lora(model: nn.Module) -> None:
    """Put plain linear layers with the adapters' effect back in place."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRALinear):
                setattr(parent, name, child.merged())
    model.requires_grad_(True)
