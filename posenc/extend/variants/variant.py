"""Variants of a checkpoint: the same weights with other positions, measured and exported alike."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from posenc.extend.frequency_search import SearchResult, apply_genome
from posenc.extend.variants.methods import METHODS, stretch
from posenc.hf import learned_tables
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.rope.apply import rotation_dropped, settings_applied
from posenc.hf.rope.settings import RopeSetting

WINDOW, DROPE = "window", "drope"
"""Names of the sliding-window baseline and of the model without its rotation."""


@dataclass(frozen=True)
class Variant:
    """Describe a checkpoint with one method of extending.

    name, summary: of the method.
    applied: returns a context manager that yields the model with the method applied, and restores
        the model afterwards.
    settings: the rotary settings of the method; empty if it writes none.
    cache_safe: True if step-by-step decoding equals the full pass.
    needs_special_runtime: True if stock tools cannot load it.
    max_tokens: the most tokens that it can read; None for any number.
    window: each token is read with at most this many tokens, itself included; None for all.
    server_keys: keys of config.json, with their values, by which a server runs it.
    """

    name: str
    summary: str
    applied: Callable[[], AbstractContextManager[nn.Module]]
    settings: tuple[RopeSetting, ...] = ()
    cache_safe: bool = True
    needs_special_runtime: bool = False
    max_tokens: int | None = None
    window: int | None = None
    server_keys: Mapping[str, Any] = field(default_factory=dict)


def unchanged_variant(checkpoint: Checkpoint) -> Variant:
    """Return the variant that changes nothing. A position table limits the tokens it can read."""
    model = checkpoint.model
    summary = METHODS["none"].summary
    max_tokens = None if learned_tables.growable_table(model) is None else checkpoint.trained_length
    return Variant(
        "none", summary, lambda: nullcontext(model), checkpoint.rope_settings, max_tokens=max_tokens
    )


def window_variant(checkpoint: Checkpoint) -> Variant:
    """Return the baseline without extension, which reads only the last tokens, as many as in
    training. A method is worth its cost only if it beats this."""
    train_length = checkpoint.trained_length
    summary = f"as trained, reading only the last {train_length} tokens"
    return Variant(
        WINDOW,
        summary,
        lambda: nullcontext(checkpoint.model),
        needs_special_runtime=True,
        window=train_length,
    )


def rope_variant(checkpoint: Checkpoint, name: str, target: int) -> Variant:
    """Return the variant of the method METHODS[name] for `target` tokens. Raises: ValueError where
    the method does not apply to this checkpoint."""
    method = METHODS[name]
    settings = stretch(checkpoint.rope_settings, method, target)
    maximum = checkpoint.trained_length if method.keeps_maximum else target
    active = partial(settings_applied, checkpoint.model, settings, maximum)
    return Variant(name, method.summary, active, settings, method.cache_safe)


def drope_variant(checkpoint: Checkpoint, target: int) -> Variant:
    """Return the variant of DroPE: no layer rotates, and the config allows `target` tokens.

    As it is, it predicts badly: it must be tuned, for which texts of the training length suffice.
    A causal mask still tells positions apart, because token i sees i + 1 keys.

    checkpoint: one for which `attentions_with_rope_switch` is not empty, see `check_after_loading`.

    Source: Gelberg et al. 2025, arXiv:2512.12167.
    """
    summary = "no layer rotates, recalibrated at the training length"
    return Variant(DROPE, summary, lambda: rotation_dropped(checkpoint.model, target))


def lengthened_table_variant(checkpoint: Checkpoint, name: str, target: int) -> Variant:
    """Return the variant with a table of learned positions lengthened to `target` rows by the
    method learned_tables.METHODS[name]."""
    summary = learned_tables.METHODS[name].summary
    return Variant(
        name, summary, lambda: learned_tables.lengthened_table(checkpoint.model, name, target)
    )


def searched_variant(checkpoint: Checkpoint, best: SearchResult, target: int) -> Variant:
    """Return the variant with the frequencies that a search found, for `target` tokens."""
    settings = apply_genome(checkpoint.rope_settings, best.genome, target)
    factors = ", ".join(f"{f:.3g}" for f in best.genome.factors)
    summary = (
        f"best of {best.num_tried} sets of frequencies: wavelengths times {factors}, logits times "
        f"{best.genome.temperature**2:.3f}"
    )
    return Variant(
        "search", summary, partial(settings_applied, checkpoint.model, settings, target), settings
    )
