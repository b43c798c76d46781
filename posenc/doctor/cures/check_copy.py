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
    reasons_by_runtime: Mapping[str, str],
    folded_share: float,
) -> list[str]:
    """Return the runtimes, with their releases, that compute from the copy what is meant, by their
    own answers.

    reasons_by_runtime: of those known to compute something else. folded_share: the share of the
    multiplier that went into the weights of q.

    Raises: ValueError for another one that computes something else, or refuses the copy.
    """
    expected = _without_folded_share(meant, folded_share)
    right_runtimes = []
    for name, computed in answers.items():
        if not computed.is_known or name in reasons_by_runtime:
            continue
        different_aspects = (
            ["error"] if computed.error else sorted(differing_aspects(computed, expected))
        )
        if different_aspects:
            why = computed.error or ", ".join(different_aspects)
            raise ValueError(
                f"not written: {name} {computed.version}, asked about the copy, computes something "
                f"else ({why})"
            )
        right_runtimes.append(f"{name} {computed.version}")
    return right_runtimes


def _without_folded_share(meant: ComputedPositions, folded_share: float) -> ComputedPositions:
    """Return what is meant with each multiplier divided by `folded_share`, the part of it that was
    multiplied into the weights of q."""
    rotations = {
        kind: LayerRotation(rotation.inv_freq, rotation.multiplier / folded_share)
        for kind, rotation in meant.rotations.items()
    }
    return replace(meant, rotations=rotations)
