"""Change the rotation of a loaded model through its config only: what is measured is what is
exported."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from posenc.hf.rope_config import RopeSetting
from posenc.hf.rope_config_write import write_settings

_FIELDS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings")


def rotary_modules(model: Any) -> list[tuple[nn.Module, str, Any]]:
    """Every rotary module of a transformers model, after its parent and its name there."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if "RotaryEmbedding" in type(child).__name__
    ]


def rebuild_rotary(model: Any) -> int:
    """Make every rotary module anew from the model's config; how many there were."""
    found = [each for each in rotary_modules(model) if hasattr(each[2], "config")]
    for parent, name, child in found:
        device = next(child.buffers()).device
        setattr(parent, name, type(child)(child.config).to(device))
    return len(found)


def rotary_frequencies(model: Any) -> dict[str | None, tuple[Tensor, float]]:
    """inv_freq and attention factor that the model's rotary module holds, by layer type (None:
    all)."""
    found: dict[str | None, tuple[Tensor, float]] = {}
    for _, _, module in rotary_modules(model):
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                layer_type = name.removesuffix("inv_freq").removesuffix("_") or None
                scaling = getattr(
                    module, f"{layer_type}_attention_scaling" if layer_type else "attention_scaling"
                )
                found[layer_type] = (buffer, float(scaling))
    return found


@contextmanager
def applied(
    model: Any, settings: tuple[RopeSetting, ...], max_positions: int
) -> Iterator[nn.Module]:
    """The model with these settings inside the block, as it was after it."""
    config: Any = model.config
    before = {
        name: copy.deepcopy(getattr(config, name)) for name in _FIELDS if hasattr(config, name)
    }
    try:
        write_settings(config, settings, max_positions)
        rebuild_rotary(model)
        yield model
    finally:
        for name, value in before.items():
            setattr(config, name, value)
        rebuild_rotary(model)
