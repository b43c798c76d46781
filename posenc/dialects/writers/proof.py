"""Check with their emulators that the named runtimes compute what is meant."""

from collections.abc import Iterable, Mapping
from typing import Any

from posenc.dialects.computed import Computed
from posenc.dialects.runtimes import NEWEST, emulate

TOLERANCE = 1e-6
"""Relative, of frequencies, multipliers and softmax scales."""


def failures(
    config: Mapping[str, Any],
    meant: Computed,
    named: Iterable[str],
    length: int | None = None,
    folded: float = 1.0,
    versions: Mapping[str, str] = NEWEST,
) -> dict[str, str]:
    """Return, by runtime, why it does not compute `meant` from this config; empty if all do.

    Runtimes without a model of the architecture are left out. folded: the share of the multiplier
    that went into the weights of q.
    """
    found = {}
    for name, computed in emulate(config, length, named, versions).items():
        if computed.knows:
            reason = disagreement(computed, meant, folded)
            if reason:
                found[name] = reason
    return found


def disagreement(computed: Computed, meant: Computed, folded: float = 1.0) -> str:
    """Return why a result differs from the one meant; empty if it does not."""
    computed = computed.when_run
    if computed.error is not None:
        return f"refuses: {computed.error}"
    for kind, layer in meant.layers.items():
        where = "" if kind == "all" else f"{kind}: "
        same_kind = computed.of_kind(kind)
        if not same_kind:
            return f"has no rotation for {kind}"
        for got in same_kind:
            if len(got.inv_freq) != len(layer.inv_freq):
                return f"{where}rotates {len(got.inv_freq)} pairs, {len(layer.inv_freq)} are meant"
            for i, (a, b) in enumerate(zip(got.inv_freq, layer.inv_freq, strict=True)):
                if not abs(a - b) <= TOLERANCE * abs(b):
                    return (
                        f"{where}pair {i} rotates by {a:.7g} radians per position, {b:.7g} is meant"
                    )
            wanted = layer.multiplier / folded
            if not abs(got.multiplier - wanted) <= TOLERANCE * wanted:
                return f"{where}the multiplier is {got.multiplier:.7g}, {wanted:.7g} is meant"
    if set(computed.without_rotation) != set(meant.without_rotation):
        return f"the layers {list(computed.without_rotation)} do not rotate"
    ours, theirs = computed.softmax_scale, meant.softmax_scale
    if ours is None or theirs is None or not abs(ours - theirs) <= TOLERANCE * theirs:
        return f"the softmax scale is {ours}, {theirs} is meant"
    return ""
