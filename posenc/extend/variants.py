"""Variants of a checkpoint: the same weights with positions changed, measured alike and exported
alike."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn

from posenc.extend.methods import METHODS, stretch
from posenc.extend.search.evolution import Found
from posenc.extend.search.genome import apply_genome
from posenc.hf import rope_config, tables
from posenc.hf.apply import applied
from posenc.hf.attention import attached, exchangeable
from posenc.hf.loading import Checkpoint
from posenc.hf.rope_config import RopeSetting
from posenc.queries_keys.position_maps import DualChunk, PositionMap, ReRoPE, SelfExtend

WINDOW = "window"


@dataclass(frozen=True)
class Variant:
    """One way to read further. `active()` is the model with it, inside a with block.

    cache_safe: step-by-step decoding equals the full pass. needs_runtime: stock tools cannot load
    it. limit: it cannot read more tokens than these. window: each token is read with only so many
    before it.
    """

    name: str
    summary: str
    active: Callable[[], AbstractContextManager[nn.Module]]
    settings: tuple[RopeSetting, ...] = ()
    cache_safe: bool = True
    needs_runtime: bool = False
    limit: int | None = None
    window: int | None = None


def window_variant(checkpoint: Checkpoint) -> Variant:
    """No extension: the last tokens alone, as many as the checkpoint was trained on. What a method
    must come near, and pass where it uses more."""
    trained = checkpoint.trained_length
    return Variant(
        WINDOW, f"as trained, reading only the last {trained} tokens",
        lambda: nullcontext(checkpoint.model), needs_runtime=True, window=trained,
    )  # fmt: skip


def rope_variant(checkpoint: Checkpoint, name: str, target: int) -> Variant:
    """A method of METHODS on this checkpoint."""
    method = METHODS[name]
    plain = rope_config.read(checkpoint.config)
    if name == "none":
        return Variant(name, method.summary, lambda: nullcontext(checkpoint.model), plain)
    settings = stretch(plain, method, target)
    maximum = checkpoint.trained_length if method.keeps_maximum else target
    return Variant(
        name,
        method.summary,
        lambda: applied(checkpoint.model, settings, maximum),
        settings,
        method.cache_safe,
    )


def table_variant(checkpoint: Checkpoint, name: str, target: int) -> Variant:
    """A longer table of learned positions; "none" is the table as it is, and reads no further."""
    model = checkpoint.model
    if name == "none":
        return Variant(
            name, METHODS[name].summary, lambda: nullcontext(model), limit=checkpoint.trained_length
        )
    summary = tables.METHODS[name][0]
    return Variant(name, summary, lambda: tables.grown(model, name, target))


def position_maps(checkpoint: Checkpoint, target: int) -> list[Variant]:
    """Training-free maps of positions into the trained range, run by posenc's attention.

    Empty where layers differ in their rotation or have sinks, the rotation is not half-split over
    whole heads or their first channels, as transformers' rotate_half models have it, or attention
    cannot be exchanged (Falcon).
    """
    settings = rope_config.read(checkpoint.config)
    if (
        len(settings) != 1
        or settings[0].layer_type is not None
        or getattr(checkpoint.config, "no_rope_layers", None)
        or any(hasattr(module, "sinks") for module in checkpoint.model.modules())
        or not exchangeable(checkpoint.model)
    ):
        return []
    setting, config = settings[0], checkpoint.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    trained = setting.original_length
    window = trained // 2
    group = max(2, -(-(target - window) // (trained - window)))
    chunk = trained * 3 // 4

    def build(kind: type[PositionMap], **options: Any) -> PositionMap:
        return kind(
            head_dim, setting.rope_theta, interleaved=False, rotary_dim=setting.rotary_dim,
            scaling=setting.scaling, **options,
        )  # fmt: skip

    maps = {
        f"exact to {window} tokens, then groups of {group}": build(
            SelfExtend, window=window, group_size=group
        ),
        f"distances stop at {window} tokens": build(ReRoPE, window=window),
        f"chunks of {chunk} tokens": build(DualChunk, chunk_size=chunk, local_window=trained // 16),
    }
    names = ("self-extend", "rerope", "dual-chunk")
    return [
        Variant(
            name,
            summary,
            lambda e=encoding: attached(checkpoint.model, lambda layer: e),
            settings,
            needs_runtime=True,
        )
        for name, (summary, encoding) in zip(names, maps.items(), strict=True)
    ]


def searched(checkpoint: Checkpoint, found: Found, target: int) -> Variant:
    """Frequencies that a search found."""
    settings = apply_genome(rope_config.read(checkpoint.config), found.genome, target)
    factors = ", ".join(f"{f:.3g}" for f in found.genome.factors)
    return Variant(
        "search",
        f"best of {found.tried} sets of frequencies: wavelengths times {factors}, logits times "
        f"{found.genome.temperature**2:.3f}",
        lambda: applied(checkpoint.model, settings, target),
        settings,
    )
