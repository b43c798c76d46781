"""Write one sentence per figure of a checkpoint, computed from what it shows."""

from collections.abc import Mapping, Sequence

import numpy as np

from posenc.sentence import join_clauses

Array = np.ndarray
MOSTLY = 0.5
"""Fraction of a head's attention above which a caption names its target; chosen, not derived."""


def in_attention(weights: Array) -> str:
    """Return a caption: which keys the heads of a layer attend to most. weights: attention weights
    (heads, queries, keys)."""
    heads, count = weights.shape[:2]
    queries = np.arange(1, count)  # the first token of a causal model sees itself only
    shares = {
        "the first token": weights[:, queries, 0],
        "the token itself": weights[:, queries, queries],
        "the one before": weights[:, queries[1:], queries[1:] - 1],
    }
    means = np.array([s.mean(-1) if s.size else np.zeros(heads) for s in shares.values()])
    targets = np.where(means.max(0) > MOSTLY, means.argmax(0), len(shares))
    parts = [
        f"{number} at {name}"
        for i, name in enumerate(shares)
        if (number := int((targets == i).sum()))
    ]
    if not parts:
        return f"None of the {heads} heads looks mostly at one place: first token, itself, before."
    elsewhere = int((targets == len(shares)).sum())
    remainder = f"; {elsewhere} elsewhere" if elsewhere else ""
    first, *others = parts
    number, _, where = first.partition(" ")
    verb = "looks" if number == "1" else "look"
    return f"Of {heads} heads, {number} {verb} mostly {', '.join([where, *others])}{remainder}."


def in_changed_words(series: Mapping[str, Sequence[float]], labels: Sequence[str]) -> str:
    """Return a caption: which token moves most and least in the first setting, with positions.

    series: relative change of each token's state, by setting. labels: of the tokens.
    """
    name, values = next(iter(series.items()))
    most, least = int(np.argmax(values)), int(np.argmin(values))
    return (
        f"{name.capitalize()}, {labels[most]!r} moves most ({values[most]:.2g}) and "
        f"{labels[least]!r} least ({values[least]:.2g})."
    )


def in_changed_layers(series: Mapping[str, Sequence[float]], rounding: float) -> str:
    """Return a caption: the first layer in which states change by `rounding` or more, by setting.

    series: relative change of states in each layer, by setting.
    """
    parts = []
    for name, values in series.items():
        first = next((i for i, value in enumerate(values) if not value < rounding), None)
        parts.append(
            f"{name} nothing moves"
            if first is None
            else f"{name} it moves from layer {first} on, up to {max(values):.2g}"
        )
    return join_clauses(parts)
