"""Compare what runtimes compute with what is meant: one walk, for words and for aspects."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.known import AS_READ, emulate

Aspect = Literal[
    "error", "arguments", "pairs", "frequencies", "multiplier", "scale", "layers", "switch"
]
"""In what a runtime's result differs from the meaning."""


class Tolerance(NamedTuple):
    """How much two numbers may differ, relative to the one that is meant: frequencies, and
    multipliers or softmax scales."""

    of_frequencies: float
    of_multipliers: float


EXACT = Tolerance(1e-6, 1e-6)
"""For configs that posenc writes."""


class Difference(NamedTuple):
    """In what a runtime's result differs from the one meant, and how, in words."""

    aspect: Aspect
    words: str


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
    for difference in differences(computed, meant, EXACT, folded):
        return difference.words
    return ""


def differences(
    computed: ComputedPositions,
    meant: ComputedPositions,
    tolerance: Tolerance,
    folded: float = 1.0,
) -> Iterator[Difference]:
    """Yield each difference of a runtime's result from the one meant: first of each kind of layer,
    then of the layers that do not rotate, last of the softmax scale.

    Both must be results, not refusals. folded: as of `disagreement`.
    """
    for kind, layer in meant.layers.items():
        same_kind = computed.rotations_of_kind(kind)
        if not same_kind:
            yield Difference("layers", f"has no rotation for {kind}")
        where = "" if kind == "all" else f"{kind}: "
        for other in same_kind:
            for aspect, words in differences_of_rotation(other, layer, tolerance, folded):
                yield Difference(aspect, f"{where}{words}")
    unrotated = set(computed.without_rotation)
    meant_unrotated = set(meant.without_rotation)
    if unrotated_too_many := sorted(unrotated - meant_unrotated):
        yield Difference(
            "layers", f"the layers {unrotated_too_many} do not rotate, and are meant to"
        )
    if rotated_too_many := sorted(meant_unrotated - unrotated):
        yield Difference("layers", f"the layers {rotated_too_many} rotate, and are not meant to")
    scale = computed.softmax_scale
    meant_scale = meant.softmax_scale
    if scale is None or meant_scale is None:
        yield Difference("scale", "the softmax scale is not known")
    elif not abs(scale - meant_scale) <= tolerance.of_multipliers * meant_scale:
        yield Difference("scale", f"the softmax scale is {scale}, {meant_scale} is meant")


def differences_of_rotation(
    layer: LayerRotation, meant: LayerRotation, tolerance: Tolerance, folded: float = 1.0
) -> Iterator[Difference]:
    """Yield the differences of the rotation of a kind of layer from the one meant: in the number of
    pairs, else in the first pair with another frequency; and in the multiplier.

    folded: as of `disagreement`.
    """
    if len(layer.inv_freq) != len(meant.inv_freq):
        words = f"rotates {len(layer.inv_freq)} pairs, {len(meant.inv_freq)} are meant"
        yield Difference("pairs", words)
    else:
        yield from _difference_of_frequencies(layer, meant, tolerance)
    wanted_multiplier = meant.multiplier / folded
    if (
        not abs(layer.multiplier - wanted_multiplier)
        <= tolerance.of_multipliers * wanted_multiplier
    ):
        words = f"the multiplier is {layer.multiplier:.7g}, {wanted_multiplier:.7g} is meant"
        yield Difference("multiplier", words)


def _difference_of_frequencies(
    layer: LayerRotation, meant: LayerRotation, tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield the first pair with another frequency than the one meant, if there is one."""
    frequencies = zip(layer.inv_freq, meant.inv_freq, strict=True)
    for i, (frequency, meant_frequency) in enumerate(frequencies):
        if not abs(frequency - meant_frequency) <= tolerance.of_frequencies * abs(meant_frequency):
            words = (
                f"pair {i} rotates by {frequency:.7g} radians per position, {meant_frequency:.7g} "
                "is meant"
            )
            yield Difference("frequencies", words)
            return
