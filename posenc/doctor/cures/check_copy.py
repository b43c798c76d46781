"""Hold a written copy to what installed runtimes answer about it themselves."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from posenc.doctor.misreadings import differing_aspects
from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation

AskAboutCopy = Callable[[Mapping[str, Any]], Mapping[str, ComputedPositions]]
"""From a config.json's object to what each installed runtime computes from it."""


def runtimes_that_answered(
    answers: Mapping[str, ComputedPositions],
    meant: ComputedPositions,
    cannot: Mapping[str, str],
    folded: float,
) -> list[str]:
    """Return the runtimes, with their releases, that compute from the copy what is meant, by their
    own answers.

    cannot: runtimes that are known to compute something else. folded: the share of the multiplier
    that went into the weights of q.

    Raises: ValueError for another one that computes something else, or refuses the copy.
    """
    expected = _without_folded_share(meant, folded)
    as_expected = []
    for name, computed in answers.items():
        if not computed.is_known or name in cannot:
            continue
        differs = "error" if computed.error else sorted(differing_aspects(computed, expected))
        if differs:
            why = computed.error or ", ".join(differs)
            raise ValueError(
                f"not written: {name} {computed.version}, asked about the copy, computes something "
                f"else ({why})"
            )
        as_expected.append(f"{name} {computed.version}")
    return as_expected


def _without_folded_share(meant: ComputedPositions, folded: float) -> ComputedPositions:
    """Return what is meant with each multiplier divided by `folded`, the share of it that was
    multiplied into the weights of q."""
    layers = {
        kind: LayerRotation(layer.inv_freq, layer.multiplier / folded)
        for kind, layer in meant.layers.items()
    }
    return replace(meant, layers=layers)
