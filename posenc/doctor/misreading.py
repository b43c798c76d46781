"""Decide whether a runtime misreads a file: compare what it computes with what the file means."""

from typing import Literal

from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation

Aspect = Literal[
    "error", "arguments", "pairs", "frequencies", "multiplier", "scale", "layers", "switch"
]
FREQUENCY_TOLERANCE = 1e-5
"""Relative; smaller differences are float32 rounding."""
MULTIPLIER_TOLERANCE = 5e-4
"""Relative; smaller temperatures change no measured loss."""


def misread_aspects(
    computed: ComputedPositions, meant: ComputedPositions | None
) -> frozenset[Aspect]:
    """Return the aspects in which a runtime's result differs from the meaning: "error" or
    "arguments" alone for a refusal, none where posenc does not know the runtime or the meaning.

    meant: None where the meaning is unclear.
    """
    if not computed.is_known:
        return frozenset()
    if computed.error is not None:
        return frozenset({"error" if _is_about_positions(computed.error) else "arguments"})
    if meant is None:
        return frozenset()
    return differing_aspects(computed, meant)


def _is_about_positions(error: str) -> bool:
    """Return False for a missing key of a config that has nothing to do with positions: mlx-lm
    stops for any missing key of its dataclass."""
    if "positional argument" not in error:
        return True
    return any(word in error for word in ("rope", "rotary", "max_position"))


def differing_aspects(computed: ComputedPositions, meant: ComputedPositions) -> frozenset[Aspect]:
    """Return the aspects in which a runtime's result differs from the one meant; empty if none.

    Both must be results, not refusals. A result without a softmax scale differs in "scale".
    """
    found: set[Aspect] = set()
    for kind, layer in meant.layers.items():
        same_kind = computed.rotations_of_kind(kind)
        if not same_kind:
            found.add("layers")
        for other in same_kind:
            found |= differing_aspects_of_rotation(other, layer)
    if set(computed.without_rotation) != set(meant.without_rotation):
        found.add("layers")
    scale = computed.softmax_scale
    meant_scale = meant.softmax_scale
    if scale is None or meant_scale is None:
        found.add("scale")
    elif not abs(scale - meant_scale) <= MULTIPLIER_TOLERANCE * meant_scale:
        found.add("scale")
    return frozenset(found)


def differing_aspects_of_rotation(layer: LayerRotation, meant: LayerRotation) -> set[Aspect]:
    """Return those of "pairs", "frequencies" and "multiplier" in which the rotation of a kind of
    layer differs from the one meant, beyond the tolerances."""
    found: set[Aspect] = set()
    if len(layer.inv_freq) != len(meant.inv_freq):
        found.add("pairs")
    else:
        pairs = zip(layer.inv_freq, meant.inv_freq, strict=True)
        if not all(abs(a - b) <= FREQUENCY_TOLERANCE * abs(b) for a, b in pairs):
            found.add("frequencies")
    if not abs(layer.multiplier - meant.multiplier) <= MULTIPLIER_TOLERANCE * meant.multiplier:
        found.add("multiplier")
    return found
