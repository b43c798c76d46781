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
    if set(computed.without_rotation) != set(meant.without_rotation):
        return f"the layers {list(computed.without_rotation)} do not rotate"
    ours = computed.softmax_scale
    theirs = meant.softmax_scale
    if ours is None or theirs is None:
        return "the softmax scale is not known"
    if not abs(ours - theirs) <= TOLERANCE * theirs:
        return f"the softmax scale is {ours}, {theirs} is meant"
    return ""


def _rotation_disagreement(layer: LayerRotation, meant: LayerRotation, folded: float) -> str:
    """Return why one rotation differs from the one meant; empty if it does not."""
    if len(layer.inv_freq) != len(meant.inv_freq):
        return f"rotates {len(layer.inv_freq)} pairs, {len(meant.inv_freq)} are meant"
    for i, (ours, theirs) in enumerate(zip(layer.inv_freq, meant.inv_freq, strict=True)):
        if not abs(ours - theirs) <= TOLERANCE * abs(theirs):
            return f"pair {i} rotates by {ours:.7g} radians per position, {theirs:.7g} is meant"
    wanted = meant.multiplier / folded
    if not abs(layer.multiplier - wanted) <= TOLERANCE * wanted:
        return f"the multiplier is {layer.multiplier:.7g}, {wanted:.7g} is meant"
    return ""
