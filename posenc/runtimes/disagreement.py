"""Compare what runtimes compute with what is meant: one walk, whoever words what it finds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from posenc.runtimes.computed_positions import ComputedPositions, LayerRotation
from posenc.runtimes.known import VERSIONS_AS_READ, emulate

Aspect = Literal[
    "error", "arguments", "pairs", "frequencies", "multiplier", "scale", "layers", "switch"
]
"""In what a runtime's result differs from the meaning.

"error": it refuses the file for its positions. "arguments": it refuses the file for something
else, an argument that its class lacks (see `misread_aspects` of the doctor). The others: number of
pairs, frequencies, multiplier of cos and sin, softmax scale, which layers rotate, when the
frequencies change.
"""


class Tolerance(NamedTuple):
    """How much two numbers may differ, relative to the one that is meant: frequencies, and
    multipliers or softmax scales."""

    of_frequencies: float
    of_multipliers: float


EXACT = Tolerance(1e-6, 1e-6)
"""For configs that posenc writes."""


class Difference(NamedTuple):
    """In what a runtime's result differs from the one meant, and the two values.

    computed, meant: for "pairs" their number; for "frequencies" the radians per position of the
    first pair that differs; for "multiplier" and "scale" the number, None if it is not known; for
    "layers" the indices of the layers that do not rotate, or, where the runtime rotates no layer of
    a kind, None and the rotation meant. kind: of the layers, "all" for all. pair: index of the
    pair, for "frequencies".
    """

    aspect: Aspect
    computed: Any
    meant: Any
    kind: str = "all"
    pair: int = 0


def reasons_for_disagreement(
    config: Mapping[str, Any],
    meant: ComputedPositions,
    runtimes: Iterable[str],
    length: int | None = None,
    folded_multiplier: float = 1.0,
    versions: Mapping[str, str] = VERSIONS_AS_READ,
) -> dict[str, str]:
    """Return, by runtime, why it does not compute `meant` from this config; empty if all do.

    Runtimes without a model of the architecture are left out. folded_multiplier: the share of the
    multiplier that went into the weights of q.
    """
    reasons: dict[str, str] = {}
    for runtime, computed in emulate(config, length, runtimes, versions).items():
        if computed.is_known:
            reason = disagreement(computed, meant, folded_multiplier)
            if reason:
                reasons[runtime] = reason
    return reasons


def disagreement(
    computed: ComputedPositions, meant: ComputedPositions, folded_multiplier: float = 1.0
) -> str:
    """Return why a result differs from the one meant, in words; empty if it does not.

    folded_multiplier: the share of the multiplier that went into the weights of q.
    """
    computed = computed.with_stop_as_refusal
    if computed.error is not None:
        return f"refuses: {computed.error}"
    for difference in differences(computed, meant, EXACT, folded_multiplier):
        return _in_words(difference)
    return ""


def _in_words(difference: Difference) -> str:
    """Return what a runtime computes and what is meant, for somebody who reads a recipe."""
    aspect, computed, meant, kind, pair = difference
    where = "" if kind == "all" else f"{kind}: "
    match aspect:
        case "pairs":
            return f"{where}rotates {computed} pairs, {meant} are meant"
        case "frequencies":
            return (
                f"{where}pair {pair} rotates by {computed:.7g} radians per position, {meant:.7g} "
                "is meant"
            )
        case "multiplier":
            return f"{where}the multiplier is {computed:.7g}, {meant:.7g} is meant"
        case "layers" if computed is None:
            return f"has no rotation for {kind}"
        case "layers":
            return _layers_in_words(set(computed), set(meant))
    if computed is None or meant is None:
        return "the softmax scale is not known"
    return f"the softmax scale is {computed}, {meant} is meant"


def _layers_in_words(unrotated: set[int], meant_unrotated: set[int]) -> str:
    """Return which layers rest that are meant to rotate, or, without such, which rotate that are
    meant to rest."""
    if unrotated_too_many := sorted(unrotated - meant_unrotated):
        return f"the layers {unrotated_too_many} do not rotate, and are meant to"
    return f"the layers {sorted(meant_unrotated - unrotated)} rotate, and are not meant to"


def differences(
    computed: ComputedPositions,
    meant: ComputedPositions,
    tolerance: Tolerance,
    folded_multiplier: float = 1.0,
) -> Iterator[Difference]:
    """Yield each difference of a runtime's result from the one meant: first of each kind of layer,
    then of the layers that do not rotate, last of the softmax scale.

    Both must be results, not refusals. folded_multiplier: as of `disagreement`.
    """
    for kind, meant_rotation in meant.rotations.items():
        rotations = computed.rotations_of_kind(kind)
        if not rotations:
            yield Difference("layers", None, meant_rotation, kind)
        for rotation in rotations:
            for difference in differences_of_rotation(
                rotation, meant_rotation, tolerance, folded_multiplier
            ):
                yield difference._replace(kind=kind)
    if set(computed.without_rotation) != set(meant.without_rotation):
        yield Difference("layers", computed.without_rotation, meant.without_rotation)
    softmax_scale = computed.softmax_scale
    meant_scale = meant.softmax_scale
    if softmax_scale is None or meant_scale is None:
        yield Difference("scale", softmax_scale, meant_scale)
    elif not abs(softmax_scale - meant_scale) <= tolerance.of_multipliers * meant_scale:
        yield Difference("scale", softmax_scale, meant_scale)


def differences_of_rotation(
    rotation: LayerRotation,
    meant: LayerRotation,
    tolerance: Tolerance,
    folded_multiplier: float = 1.0,
) -> Iterator[Difference]:
    """Yield the differences of the rotation of a kind of layer from the one meant: in the number of
    pairs, else in the first pair with another frequency; and in the multiplier.

    folded_multiplier: as of `disagreement`.
    """
    if len(rotation.inv_freq) != len(meant.inv_freq):
        yield Difference("pairs", len(rotation.inv_freq), len(meant.inv_freq))
    else:
        yield from _difference_of_frequencies(rotation, meant, tolerance)
    multiplier = rotation.multiplier
    meant_multiplier = meant.multiplier / folded_multiplier
    if not abs(multiplier - meant_multiplier) <= tolerance.of_multipliers * meant_multiplier:
        yield Difference("multiplier", multiplier, meant_multiplier)


def _difference_of_frequencies(
    rotation: LayerRotation, meant: LayerRotation, tolerance: Tolerance
) -> Iterator[Difference]:
    """Yield the first pair with another frequency than the one meant, if there is one."""
    frequency_pairs = zip(rotation.inv_freq, meant.inv_freq, strict=True)
    for i, (frequency, meant_frequency) in enumerate(frequency_pairs):
        if not abs(frequency - meant_frequency) <= tolerance.of_frequencies * abs(meant_frequency):
            yield Difference("frequencies", frequency, meant_frequency, pair=i)
            return
