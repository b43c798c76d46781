"""The sentences that `posenc inspect encoding` prints first, and the judgement of a spec sheet that
they say: what distance does to the weight of a key, what the encoding costs, where it stops
working."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from posenc.encodings import ModelShape, PerLayer, PositionEncoding, create
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.precision import exact_frequencies_of
from posenc.inspect.encoding.scores import Decay
from posenc.testing.harness import encoding_of_first_layer

NEGLIGIBLE_LOGITS = math.log(1.25)
"""A smaller change of a score, in logits, counts as none: a quarter more weight.

Chosen, not derived."""
LOGITS_OF_LARGEST_RATIO = math.log(10_000)
"""Larger differences of logits are written as "over 10,000 times" the weight."""
_BY_CONTENT_CLAUSE = (
    "weighs a key by the tokens between, not by distance itself; of equal tokens in a row"
)
_CAUSES = {
    "padding": "with padding",
    "packing": "with other documents in the window",
    "batch": "with the other rows of a batch",
    "cache": "between one pass and token by token",
}
"""What changes results and must not, by the names of SpecSheet.differences."""


class Point(NamedTuple):
    """A distance in tokens, and the scores in logits that a query gives, at this distance, to a key
    equal to it and to an unrelated key."""

    distance: int
    score_of_equal: float
    score_of_unrelated: float


@dataclass(frozen=True)
class NearAndFar:
    """The effect of distance on the weight of a key.

    favours: the end with more weight for a key equal to the query; "neither" if both ends are level
        and distances between them are not; "nothing" if all are level.
    by_content: True if the encoding reads the tokens between, so that distance alone decides
        nothing.
    near, far: the scores at the nearest and at the farthest distance at which a key is seen.
    logit_span: logits between the largest and the smallest score of an equal key.
    last_visible_distance: the last distance that is seen, if farther ones are hidden; else None.
    change_of_unrelated: how the score of an unrelated key changes from near to far: "alike" if it
        changes in the direction of an equal key's, at least half as much; "level" if it does not
        change; else "less".
    """

    favours: Literal["near", "far", "neither", "nothing"]
    by_content: bool
    near: Point
    far: Point
    logit_span: float
    last_visible_distance: int | None
    change_of_unrelated: Literal["alike", "level", "less"]


class NewAngles(NamedTuple):
    """Where rotary pairs reach angles that training never showed.

    position: the first position at which some pair turns further than ever in training.
    num_pairs: number of pairs that do so before twice that position.
    """

    position: int
    num_pairs: int


@dataclass(frozen=True)
class EncodingLimits:
    """Where an encoding stops working; None, empty or False where it does not.

    failed_checks: names of checks of the contract.
    last_position: the last one that it accepts, on each of num_axes axes.
    changed_by: what changes results and must not, by the names of SpecSheet.differences.
    new_angles: where rotary pairs reach angles that training never showed.
    num_pairs_new_on_grids: number of rotary pairs that reach such angles on grids with a longer
        side than in training.
    has_new_positions: True if what it adds beyond the training length was never seen in training.
    is_blind: True if it does not encode order.
    is_symmetric: True if it cannot distinguish before from after.
    last_distinct_distance: the distance in tokens up to which all neighbours are distinguished, if
        that is less than half of the training length; else None.
    """

    failed_checks: list[str]
    last_position: int | None
    num_axes: int
    changed_by: list[str]
    new_angles: NewAngles | None
    num_pairs_new_on_grids: int
    has_new_positions: bool
    is_blind: bool
    is_symmetric: bool
    last_distinct_distance: int | None


@dataclass(frozen=True)
class Judgement:
    """A spec sheet and what follows from it.

    near_and_far: None if a query sees a single token. takes_time: True if the confidence interval
    of the relative time excludes 1. layers_per_pattern: number of layers after which a hybrid's
    encodings repeat; 1 if all layers have the same.
    """

    sheet: SpecSheet
    near_and_far: NearAndFar | None
    takes_time: bool
    limits: EncodingLimits
    layers_per_pattern: int

    @property
    def is_untrained(self) -> bool:
        """Return True if the encoding has parameters, which are still random."""
        return self.sheet.parameters > 0


def judge(sheet: SpecSheet) -> Judgement:
    """Return the judgement of an encoding: what distance does to weights, whether it takes time,
    and where it stops working."""
    encoding = create(sheet.name, sheet.shape)
    low, _, high = sheet.cost
    return Judgement(
        sheet,
        judge_distances(sheet.decay, by_content=sheet.resolution is None),
        low > 1 or high < 1,
        judge_limits(sheet, encoding_of_first_layer(encoding)),
        encoding.period if isinstance(encoding, PerLayer) else 1,
    )


def judge_distances(decay: Decay, *, by_content: bool) -> NearAndFar | None:
    """Return the effect of distance on the weight of a key; None if a query sees a single token.

    by_content: True for a method that reads the tokens between query and key.
    """
    points = _visible_points(decay)
    if len(points) < 2:
        return None
    near = points[0]
    far = points[-1]
    scores = [point.score_of_equal for point in points]
    logit_span = max(scores) - min(scores)
    fall = near.score_of_equal - far.score_of_equal
    if logit_span <= NEGLIGIBLE_LOGITS:  # no distance differs from another
        favours = "nothing"
    elif abs(fall) <= NEGLIGIBLE_LOGITS:
        favours = "neither"
    else:
        favours = "near" if fall > 0 else "far"
    other_fall = near.score_of_unrelated - far.score_of_unrelated
    if fall * other_fall > 0 and abs(other_fall) >= abs(fall) / 2:
        change_of_unrelated = "alike"
    else:
        change_of_unrelated = "level" if abs(other_fall) <= NEGLIGIBLE_LOGITS else "less"
    last_visible_distance = far.distance if far.distance != decay.distances[-1] else None
    return NearAndFar(
        favours, by_content, near, far, logit_span, last_visible_distance, change_of_unrelated
    )


def _visible_points(decay: Decay) -> list[Point]:
    """Return the scores at each distance at which a key is visible; distance 0, the query itself,
    only if there is no other."""
    nearest = min(1, decay.distances[-1])
    points = []
    for distance, score_of_equal, score_of_unrelated in zip(
        decay.distances, decay.same, decay.mean, strict=True
    ):
        if score_of_equal is not None and score_of_unrelated is not None and distance >= nearest:
            points.append(Point(distance, score_of_equal, score_of_unrelated))
    return points


def judge_limits(sheet: SpecSheet, encoding: PositionEncoding) -> EncodingLimits:
    """Return where the encoding stops working."""
    num_axes = encoding.claims.num_axes
    is_on_grid = num_axes == 2 and 2 in sheet.places
    limit = sheet.max_positions
    return EncodingLimits(
        failed_checks=[*(sheet.contract or {})],
        last_position=None if limit is None else limit - 1,
        num_axes=num_axes,
        changed_by=[name for name in _UNWANTED_CAUSES if not sheet.holds[name]],
        new_angles=new_angles(sheet, encoding),
        num_pairs_new_on_grids=len(sheet.unfinished_pairs) if is_on_grid else 0,
        has_new_positions=1 in sheet.places and limit is None,
        is_blind=sheet.direction == "blind",
        is_symmetric=sheet.direction == "symmetric",
        last_distinct_distance=_short_resolution(sheet),
    )


_UNWANTED_CAUSES = ("padding", "packing", "batch", "cache")
"""Differences of a spec sheet that should be rounding for every encoding."""


def _short_resolution(sheet: SpecSheet) -> int | None:
    """Return the distance up to which float32 distinguishes all neighbours; None if that is far
    enough.

    Half of the training length, or of the positions that the encoding accepts, is far enough:
    chosen, not derived.
    """
    resolution = (sheet.resolution or {}).get("float32")
    num_positions = min(sheet.shape.train_length, sheet.max_positions or sheet.shape.train_length)
    if resolution is None or 2 * resolution.every >= num_positions:
        return None
    return resolution.every


def _rotates_along_one_axis(sheet: SpecSheet, encoding: PositionEncoding) -> bool:
    """Return True if the encoding rotates by the token's own position on one axis, with the same
    frequencies at any length; False if there are several axes, or if it maps positions to
    others."""
    if encoding.claims.num_axes != 1 or exact_frequencies_of(encoding) is None:
        return False
    first_positions = torch.arange(2)
    # There is one pass by each map of positions.
    is_mapped = len(encoding.passes(first_positions, first_positions)) > 1
    # Frequencies that depend on the length make a cached pass differ from a whole one.
    return not is_mapped and sheet.holds["cache"] and 2 in sheet.places


def new_angles(sheet: SpecSheet, encoding: PositionEncoding) -> NewAngles | None:
    """Return where rotary pairs reach angles that training never showed; None if no pair does.

    A scaled rotation is treated as trained before its scaling. Returns None for position maps,
    several axes, and frequencies that depend on the length.
    """
    if not _rotates_along_one_axis(sheet, encoding):
        return None
    train_length = sheet.shape.train_length
    # None: no rotation.
    wavelengths = [
        math.inf if wavelength is None else wavelength for wavelength in sheet.wavelengths
    ]
    first_positions = []
    for wavelength, unscaled_wavelength in zip(
        wavelengths, _unscaled_wavelengths(wavelengths, sheet.shape), strict=True
    ):
        # Training showed `train_length` / `unscaled_wavelength` turns; scaled, they take this many
        # tokens.
        if unscaled_wavelength > train_length and wavelength < math.inf:
            first_positions.append(
                max(train_length, round(train_length * wavelength / unscaled_wavelength))
            )
    if not first_positions:
        return None
    first_position = min(first_positions)
    return NewAngles(
        first_position, sum(position < 2 * first_position for position in first_positions)
    )


def _unscaled_wavelengths(wavelengths: list[float], shape: ModelShape) -> list[float]:
    """Return the wavelengths before their scaling: those of plain RoPE if there are as many and
    none of `wavelengths` is shorter than RoPE's; else `wavelengths`."""
    rope_wavelengths = plain_wavelengths(shape)
    # Of some of the channels, or of another base, nothing is known to be stretched.
    if len(rope_wavelengths) != len(wavelengths):
        return wavelengths
    # Shorter by less than a thousandth counts as equal: chosen, not derived.
    if any(
        wavelength < 0.999 * rope_wavelength
        for wavelength, rope_wavelength in zip(wavelengths, rope_wavelengths, strict=True)
    ):
        return wavelengths
    return rope_wavelengths


def plain_wavelengths(shape: ModelShape) -> list[float]:
    """Return the tokens per turn of each pair of RoPE without a scaling, for heads of this
    shape."""
    frequencies = exact_frequencies_of(create("rope", shape))
    assert frequencies is not None  # RoPE rotates
    return [2 * math.pi / float(f) for f in frequencies.inv_freq]


def answer_in_words(judgement: Judgement) -> str:
    """Return sentences: what the encoding does with near and far keys, what it costs, and where it
    stops working."""
    sheet = judgement.sheet
    untrained_clause = (
        "Before any training, which may change this, " if judgement.is_untrained else ""
    )
    distance_sentence = near_and_far_in_words(judgement.near_and_far)
    limits_clause = limits_in_words(judgement.limits, sheet)
    limits_sentence = (
        limits_clause.capitalize()
        if limits_clause.startswith("nothing")
        else f"Where it ends: {limits_clause}"
    )
    layer_note = first_layer_note(judgement)
    layer_sentence = f" {layer_note}" if layer_note else ""
    cost_clause = cost_in_words(judgement)
    return (
        f"{untrained_clause}{sheet.name} {distance_sentence}. It costs {cost_clause}. "
        f"{limits_sentence}.{layer_sentence}"
    )


def first_layer_note(judgement: Judgement) -> str:
    """Return a sentence for a hybrid, whose encodings repeat after some layers, that its first
    layer was measured; "" for other encodings."""
    if judgement.layers_per_pattern == 1:
        return ""
    return f"This is its first layer: {judgement.layers_per_pattern} layers are a pattern."


def near_and_far_in_words(near_and_far: NearAndFar | None) -> str:
    """Return a sentence without its subject: the effect of distance on the weight of a key equal to
    the query and of an unrelated one."""
    if near_and_far is None:
        return "sees a single token"
    end_clause = ""
    if near_and_far.last_visible_distance is not None:
        end_clause = f", and sees nothing beyond {near_and_far.last_visible_distance:,} tokens"
    near, far = near_and_far.near, near_and_far.far
    fall = near.score_of_equal - far.score_of_equal
    heavier, lighter = (near, far) if fall > 0 else (far, near)
    ratio_words = _weight_ratio_in_words(abs(fall))
    weight_clause = (
        f"{ratio_words} as much weight at distance {heavier.distance:,} as at {lighter.distance:,}"
    )
    favoured_tokens = f"{near_and_far.favours} tokens"
    match near_and_far.favours:
        case "nothing" if near_and_far.by_content:
            return f"{_BY_CONTENT_CLAUSE} all get the same weight{end_clause}"
        case "nothing":
            return f"treats near and far alike{end_clause}"
        case "neither":
            return (
                "favours neither near nor far: a token equal to the query gets weights that differ "
                f"up to {_weight_ratio_in_words(near_and_far.logit_span)} in between{end_clause}"
            )
    if near_and_far.by_content:
        return f"{_BY_CONTENT_CLAUSE} it favours {favoured_tokens}: {weight_clause}{end_clause}"
    if near_and_far.change_of_unrelated == "alike":
        return (
            f"favours {favoured_tokens}, whatever their content: one equal to the query gets "
            f"{weight_clause}{end_clause}"
        )
    unrelated_words = (
        "much the same" if near_and_far.change_of_unrelated == "level" else "less differently"
    )
    return (
        f"favours {favoured_tokens} that match the query: they get {weight_clause}, while "
        f"unrelated ones weigh {unrelated_words} near and far{end_clause}"
    )


def _weight_ratio_in_words(logits: float) -> str:
    """Return the ratio of weights that a difference of logits makes: "2.7 times" for 1."""
    if logits > LOGITS_OF_LARGEST_RATIO:
        return "over 10,000 times"
    ratio = math.exp(logits)
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def cost_in_words(judgement: Judgement) -> str:
    """Return what follows "It costs": the number of parameters, and the time of a layer relative to
    one without an encoding, if the two differ measurably."""
    sheet = judgement.sheet
    parameters_clause = "no parameters"
    if sheet.parameters:
        parameters_clause = (
            f"{sheet.parameters:,} parameters{' in every layer' if sheet.per_layer else ''}"
        )
    if not judgement.takes_time:
        return f"{parameters_clause} and no measurable time"
    low, middle, high = sheet.cost
    time_clause = f"{middle:.2f} times as long ({low:.2f} to {high:.2f})"
    return f"{parameters_clause}, and a layer takes {time_clause}"


def limits_in_words(limits: EncodingLimits, sheet: SpecSheet) -> str:
    """Return where the encoding stops working, the hardest limit first, two at most."""
    clauses = [*_limit_clauses(limits, sheet)]
    if not clauses:
        return (
            f"nothing that was measured here ends with the {sheet.shape.train_length:,} tokens of "
            "the training"
        )
    return "; ".join(clauses[:2])


def _limit_clauses(limits: EncodingLimits, sheet: SpecSheet) -> Iterator[str]:
    """Yield a clause for each limit, the hardest first."""
    train_length = sheet.shape.train_length
    if limits.failed_checks:
        yield (
            f"it breaks {len(limits.failed_checks)} of the promises that posenc's own encodings "
            f"keep, such as: {limits.failed_checks[0].replace('_', ' ')}"
        )
    if limits.last_position is not None:
        axis_clause = " on any axis" if limits.num_axes > 1 else ""
        yield f"it accepts no position beyond {limits.last_position:,}{axis_clause}"
    if limits.changed_by:
        yield f"its results change {' and '.join(_CAUSES[name] for name in limits.changed_by)}"
    if limits.new_angles is not None:
        yield (
            f"from position {limits.new_angles.position:,} on, {limits.new_angles.num_pairs} of "
            f"its {sheet.num_pairs} rotary pairs reach angles that training on {train_length:,} "
            "tokens never showed"
        )
    elif limits.num_pairs_new_on_grids:
        yield (
            f"on grids of more than {sheet.axis_length:,} cells to a side, "
            f"{limits.num_pairs_new_on_grids} of its {sheet.num_pairs} rotary pairs reach angles "
            "that training never showed"
        )
    elif limits.has_new_positions:
        yield f"positions from {train_length:,} on are new to a model trained on {train_length:,}"
    if limits.is_blind:
        yield "by itself it does not encode order; a causal mask must"
    elif limits.last_distinct_distance is not None:
        distance_in_words = f"{limits.last_distinct_distance:,}"
        yield f"beyond {distance_in_words} tokens some neighbouring distances look alike to it"
    if limits.is_symmetric:
        yield "by itself it cannot distinguish before from after; a causal mask must"
