"""Initial weights that depend on the seed and on a parameter's name and shape alone."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from posenc.encoding.base import PositionEncoding
from posenc.models.config import DecoderConfig


def initialise(
    model: nn.Module,
    config: DecoderConfig,
    seed: int | None = None,
    *,
    tied_to: nn.Module | None = None,
) -> None:
    """Draw all weights of `model` outside of position encodings.

    Each parameter has a generator of its own, on the CPU, seeded with the seed and the parameter's
    name: models with different encodings, or on different devices, start from the same weights.
    `seed` None means the one given to torch.manual_seed. `tied_to` is the norm before a head that
    is tied to the token embeddings.

    Token embeddings have unit variance, the size of sinusoids and of what layers add. With a head
    tied to them the last norm's gain starts at embed_dim^-3/4, so that logits start small and a
    token's own, which its embedding in the residual stream favours, at embed_dim^1/4. No multiplier
    is left in the forward pass. q and k get
    fan_in^-1/2 head_dim^-1/4: logits start at size 1 for an encoding without 1/sqrt(head_dim) (T5)
    and below that for the others. What is added to the residual stream is divided by the square
    root of the number of additions.
    """
    seed = torch.initial_seed() if seed is None else seed
    gains = {
        "q_proj": config.shape().head_dim ** -0.25,  # type: ignore[operator]
        "k_proj": config.shape().head_dim ** -0.25,  # type: ignore[operator]
        "o_proj": (2 * config.num_layers) ** -0.5,
        "down_proj": (2 * config.num_layers) ** -0.5,
        "head": 0.25,
    }
    skipped = tuple(
        f"{name}." for name, m in model.named_modules() if isinstance(m, PositionEncoding)
    )
    for name, module in model.named_modules():
        if f"{name}.".startswith(skipped):
            continue
        if isinstance(module, nn.Linear):
            std = gains.get(name.rpartition(".")[2], 1.0) * module.in_features**-0.5
            _fill(module.weight, std, f"{name}.weight", seed)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif name.rpartition(".")[2] == "tokens":
            _fill(module.weight, 1.0, f"{name}.weight", seed)  # type: ignore[arg-type]
        elif isinstance(module, nn.RMSNorm | nn.LayerNorm):
            module.reset_parameters()
    if tied_to is not None:
        nn.init.constant_(tied_to.weight, config.embed_dim**-0.75)  # type: ignore[arg-type]


def _fill(weight: Tensor, std: float, name: str, seed: int) -> None:
    if weight.is_meta:
        return
    # torch's CPU generator reads 32 bits of its seed.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
    with torch.no_grad():
        weight.copy_(values * std)
