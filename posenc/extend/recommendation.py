"""Recommend a method of extending, with the reason."""

from __future__ import annotations

import math

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.options import Options
from posenc.extend.variants.variant import WINDOW, Variant


def recommend(
    measured: dict[str, tuple[Variant, Evaluation]], trained: int, options: Options
) -> tuple[str, str]:
    """Return the variant with the lowest mean loss over all buckets that stock tools can load, and
    why.

    Every bucket counts the same, so that neither the short range nor the long one is sacrificed.
    """
    allowed = {
        name: evaluation
        for name, (variant, evaluation) in measured.items()
        if not variant.needs_runtime and (variant.cache_safe or options.allow_cache_unsafe)
    }
    best = min(allowed, key=lambda name: allowed[name].average())
    base, chosen = measured["none"][1], allowed[best]
    if best == "none":
        return best, (
            "No method tried lowers the mean loss over all positions: leave the checkpoint as it "
            f"is, or tune. {_against_window(measured, best, trained)}"
            f"{_better_map(measured, best)}".rstrip()
        )
    lost = chosen.short(trained) - base.short(trained)
    gained = base.long(trained) - chosen.long(trained)
    if math.isnan(gained):
        return best, (
            f"{best} has the lowest mean loss over all position buckets, "
            f"{chosen.long(trained):.2f} nats per token beyond {trained} tokens, where the model "
            f"could not read before; within them it costs {lost:.2f}."
        )
    return best, (
        f"{best} has the lowest mean loss over all position buckets: beyond {trained} tokens it "
        f"saves {gained:.2f} nats per token, within them it costs {lost:.2f}. "
        f"{_against_window(measured, best, trained)}{_better_map(measured, best)}"
        "This says nothing about tasks that need a fact from far back; see the passkey grid for "
        "that."
    )


def _better_map(measured: dict[str, tuple[Variant, Evaluation]], best: str) -> str:
    """Return a sentence about a position map that reads better than all that stock tools load."""
    maps = {
        name: evaluation.average()
        for name, (variant, evaluation) in measured.items()
        if variant.needs_runtime and variant.window is None
    }
    first = min(maps, key=lambda name: maps[name], default=None)
    if first is None:
        return ""
    gain = measured[best][1].average() - maps[first]
    if not gain > 0:  # NaN is none
        return ""
    return f"{first} reads {gain:.2f} nats better over all positions, but no stock tool runs it. "


def _against_window(
    measured: dict[str, tuple[Variant, Evaluation]], best: str, trained: int
) -> str:
    if WINDOW not in measured:
        return ""
    more = measured[best][1].long(trained) - measured[WINDOW][1].long(trained)
    if math.isnan(more):  # a table that ends
        return ""
    if more > 0:
        return (
            f"The model as trained, reading only the last {trained} tokens, is {more:.2f} nats "
            "better there: what lies further back does not help yet; tuning may change that. "
        )
    return (
        f"It reads {-more:.2f} nats better there than the model as trained with only the last "
        f"{trained} tokens: it uses what lies further back. "
    )
