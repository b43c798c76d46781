"""Check with their emulators that the named runtimes compute what is meant."""

from collections.abc import Iterable, Mapping
from typing import Any

from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.known import AS_READ, emulate

TOLERANCE = 1e-6
"""Relative, of frequencies, multipliers and softmax scales."""


def reasons_for_disagreement(
    config: Mapping[str, Any],
    meant: ComputedPositions,
    named: Iterable[str],
    length: int | None = None,
    folded: float = 1.0,
    versions: Mapping[str, str] = AS_READ,
) -> dict[str, str]:
    """Return, by runtime, why it does not compute `meant` from this config; empty if all do.

    Runtimes without a model of the architecture are left out. folded: the share of the multiplier
    that went into the weights of q.
    """
    reasons: dict[str, str] = {}
    for name, computed in emulate(config, length, named, versions).items():
        if computed.is_known:
            reason = disagreement(computed, meant, folded)
            if reason:
                reasons[name] = reason
    return reasons


def disagreement(computed: ComputedPositions, meant: ComputedPositions, folded: float = 1.0) -> str:
    """Return why a result differs from the one meant, in words; empty if it does not.

    folded: the share of the multiplier that went into the weights of q.
    """
    computed = computed.with_stop_as_refusal
    if computed.error is not None:
        return f"refuses: {computed.error}"
    for kind, layer in meant.layers.items():
        same_kind = computed.rotations_of_kind(kind)
        if not same_kind:
            return f"has no rotation for {kind}"
        where = "" if kind == "all" else f"{kind}: "
        for other in same_kind:
            reason = _rotation_disagreement(other, layer, folded)
            if reason:
                return f"{where}{reason}"
    unrotated = set(computed.without_rotation)
    meant_unrotated = set(meant.without_rotation)
    if unrotated - meant_unrotated:
        return f"the layers {sorted(unrotated - meant_unrotated)} do not rotate, and are meant to"
    if meant_unrotated - unrotated:
        return f"the layers {sorted(meant_unrotated - unrotated)} rotate, and are not meant to"
    scale = computed.softmax_scale
    meant_scale = meant.softmax_scale
    if scale is None or meant_scale is None:
        return "the softmax scale is not known"
    if not abs(scale - meant_scale) <= TOLERANCE * meant_scale:
        return f"the softmax scale is {scale}, {meant_scale} is meant"
    return ""


def _rotation_disagreement(layer: LayerRotation, meant: LayerRotation, folded: float) -> str:
    """Return why one rotation differs from the one meant; empty if it does not."""
    if len(layer.inv_freq) != len(meant.inv_freq):
        return f"rotates {len(layer.inv_freq)} pairs, {len(meant.inv_freq)} are meant"
    frequencies = zip(layer.inv_freq, meant.inv_freq, strict=True)
    for i, (frequency, meant_frequency) in enumerate(frequencies):
        if not abs(frequency - meant_frequency) <= TOLERANCE * abs(meant_frequency):
            return (
                f"pair {i} rotates by {frequency:.7g} radians per position, {meant_frequency:.7g} "
                "is meant"
            )
    wanted = meant.multiplier / folded
    if not abs(layer.multiplier - wanted) <= TOLERANCE * wanted:
        return f"the multiplier is {layer.multiplier:.7g}, {wanted:.7g} is meant"
    return ""
