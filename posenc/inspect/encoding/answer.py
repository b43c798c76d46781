"""Answer in plain words, from its spec sheet, what an encoding does with near and far, what it
costs and where it breaks."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from posenc.encodings import ModelShape, PerLayer, PositionEncoding, create
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.precision import angles_of
from posenc.inspect.encoding.scores import Decay
from posenc.testing.layer import encoding_of_first_layer

LEVEL = math.log(1.25)
"""A smaller change of a score, in logits, counts as none: a quarter more weight.

Chosen, not derived."""
LOGITS_OF_LARGEST_RATIO = math.log(10_000)
"""Larger differences of logits are written as "over 10,000 times" the weight."""


@dataclass(frozen=True)
class Answer:
    """What to say first about an encoding; each text is the end of a sentence.

    name: of the encoding, as registered. near_and_far: what distance does to the weight of a key.
    cost: parameters and time. limits: where it stops working. untrained: True if it has parameters,
    which are still random.
    """

    name: str
    near_and_far: str
    cost: str
    limits: str
    untrained: bool
    pattern: int
    """Layers after which a hybrid's encodings repeat; 1 if all layers are alike."""

    def __str__(self) -> str:
        before = "Before any training, which may change this, " if self.untrained else ""
        ends = f"Where it ends: {self.limits}"
        if self.limits.startswith("nothing"):
            ends = self.limits.capitalize()
        layers = ""
        if self.pattern > 1:
            layers = f" This is its first layer: {self.pattern} layers are a pattern."
        return f"{before}{self.name} {self.near_and_far}. It costs {self.cost}. {ends}.{layers}"

    def cells(self) -> list[str]:
        """Return the answer as the row of a table."""
        start = "before training " if self.untrained else ""
        return [self.name, start + self.near_and_far, self.cost, self.limits]


def answer(sheet: SpecSheet) -> Answer:
    """Return in words what distance does to weights, what the encoding costs and where it stops
    working."""
    encoding = create(sheet.name, sheet.shape)
    return Answer(
        sheet.name,
        near_and_far(sheet.decay, sheet.resolution is None),
        cost(sheet),
        limits(sheet, encoding_of_first_layer(encoding)),
        sheet.parameters > 0,
        encoding.period if isinstance(encoding, PerLayer) else 1,
    )


def near_and_far(decay: Decay, by_content: bool) -> str:
    """Return, as the end of a sentence, the effect of distance on the weight of a key equal to the
    query and of another one.

    by_content: True for a method that reads the tokens between query and key.
    """
    points = _visible_points(decay)
    if len(points) < 2:
        return "sees a single token"
    near, far = points[0], points[-1]
    ends = ""
    if far.distance != decay.distances[-1]:
        ends = f", and sees nothing beyond {far.distance:,} tokens"
    level, favours = _PHRASES_BY_CONTENT if by_content else _PHRASES_BY_DISTANCE
    scores = [point.equal for point in points]
    span = max(scores) - min(scores)
    if span <= LEVEL:
        return level + ends
    fall = near.equal - far.equal
    if abs(fall) <= LEVEL:
        return (
            f"favours neither near nor far: a token equal to the query gets weights that differ "
            f"up to {_weight_ratio_in_words(span)} in between{ends}"
        )
    if fall > 0:
        direction = favours.format("near tokens")
        most, least = near, far
    else:
        direction = favours.format("far tokens")
        most, least = far, near
    ratio = _weight_ratio_in_words(abs(fall))
    more = f"{ratio} as much weight at distance {most.distance:,} as at {least.distance:,}"
    if by_content:
        return f"{direction}: {more}{ends}"
    other_fall = near.other - far.other
    # At least half of the move is that of any key.
    moves_any_key = fall * other_fall > 0 and abs(other_fall) >= abs(fall) / 2
    if moves_any_key:
        return f"{direction}, whatever their content: one equal to the query gets {more}{ends}"
    alike = "much the same" if abs(other_fall) <= LEVEL else "less differently"
    return (
        f"{direction} that match the query: they get {more}, while unrelated ones weigh {alike} "
        f"near and far{ends}"
    )


_PHRASES_BY_DISTANCE = ("treats near and far alike", "favours {}")
_PHRASES_BY_CONTENT = (
    "weighs a key by the tokens between, not by distance itself; of equal tokens in a row all get "
    "the same weight",
    "weighs a key by the tokens between, not by distance itself; of equal tokens in a row it "
    "favours {}",
)
"""What is said where scores of equal tokens are level, and where they are not ({}: near or far
tokens): of methods that read only positions, and of those that read the tokens between."""


class _Point(NamedTuple):
    """A distance and the scores at it, of a key equal to the query and of another one."""

    distance: int
    equal: float
    other: float


def _visible_points(decay: Decay) -> list[_Point]:
    """Return the scores at each distance at which a key is visible; distance 0, the query itself,
    only if there is no other."""
    nearest = min(1, decay.distances[-1])
    points = []
    for distance, equal, other in zip(decay.distances, decay.same, decay.mean, strict=True):
        if equal is not None and other is not None and distance >= nearest:
            points.append(_Point(distance, equal, other))
    return points


def cost(sheet: SpecSheet) -> str:
    """Return, as the end of "It costs", the number of parameters and the time of a layer.

    The time is relative to a layer without an encoding, and is given only if its confidence
    interval excludes 1; otherwise the answer is "no measurable time".
    """
    low, middle, high = sheet.cost
    learned = "no parameters"
    if sheet.parameters:
        learned = f"{sheet.parameters:,} parameters{' in every layer' if sheet.per_layer else ''}"
    if low > 1 or high < 1:
        times = f"{middle:.2f} times as long ({low:.2f} to {high:.2f})"
        return f"{learned}, and a layer takes {times}"
    return f"{learned} and no measurable time"


def limits(sheet: SpecSheet, encoding: PositionEncoding) -> str:
    """Return where the encoding stops working, the hardest limit first, two at most."""
    ends = [
        _failed_checks_in_words(sheet),
        _position_limit_in_words(sheet, encoding),
        _unwanted_changes_in_words(sheet),
        _untrained_positions_in_words(sheet, encoding),
        _order_limit_in_words(sheet),
    ]
    if sheet.direction == "symmetric":
        ends.append("by itself it cannot distinguish before from after; a causal mask must")
    known = [end for end in ends if end]
    if not known:
        return (
            f"nothing that was measured here ends with the {sheet.shape.train_length:,} tokens of "
            "the training"
        )
    return "; ".join(known[:2])


def _failed_checks_in_words(sheet: SpecSheet) -> str:
    """Return how many checks of the contract fail, and the first of them; "" if none does."""
    if not sheet.contract:
        return ""
    return (
        f"it breaks {len(sheet.contract)} of the promises that posenc's own encodings keep, "
        f"such as: {next(iter(sheet.contract)).replace('_', ' ')}"
    )


def _position_limit_in_words(sheet: SpecSheet, encoding: PositionEncoding) -> str:
    """Return a clause with the last position that the encoding accepts; "" without a limit."""
    if sheet.max_positions is None:
        return ""
    axis = " on any axis" if encoding.claims.num_axes > 1 else ""
    return f"it accepts no position beyond {sheet.max_positions - 1:,}{axis}"


def _unwanted_changes_in_words(sheet: SpecSheet) -> str:
    """Return a clause with all that changes results and must not, such as padding; "" if nothing
    does."""
    causes = [words for key, words in _UNWANTED_CAUSES.items() if not sheet.holds[key]]
    return f"its results change {' and '.join(causes)}" if causes else ""


def _untrained_positions_in_words(sheet: SpecSheet, encoding: PositionEncoding) -> str:
    """Return a clause with the angles or positions that are new to a model beyond its training
    length; "" if none are known to be."""
    trained = sheet.shape.train_length
    new = new_angles(sheet, encoding)
    if new is not None:
        return (
            f"from position {new.position:,} on, {new.pairs} of its {sheet.num_pairs} rotary pairs "
            f"reach angles that training on {trained:,} tokens never showed"
        )
    is_on_grid = encoding.claims.num_axes == 2 and 2 in sheet.places
    if is_on_grid and sheet.unfinished_pairs:
        return (
            f"on grids of more than {sheet.axis_length:,} cells to a side, "
            f"{len(sheet.unfinished_pairs)} of its {sheet.num_pairs} rotary pairs reach angles "
            "that training never showed"
        )
    if 1 in sheet.places and sheet.max_positions is None:
        return f"positions from {trained:,} on are new to a model trained on {trained:,}"
    return ""


def _order_limit_in_words(sheet: SpecSheet) -> str:
    """Return a clause that the encoding distinguishes no positions, or no neighbouring ones from
    some distance on; "" if neither is so."""
    if sheet.direction == "blind":
        return "by itself it does not encode order; a causal mask must"
    resolution = (sheet.resolution or {}).get("float32")
    reach = min(sheet.shape.train_length, sheet.max_positions or sheet.shape.train_length)
    # A resolution up to half of the training length counts as enough: chosen, not derived.
    if resolution is not None and 2 * resolution.every < reach:
        return f"beyond {resolution.every:,} tokens some neighbouring distances look alike to it"
    return ""


_UNWANTED_CAUSES = {
    "padding": "with padding",
    "packing": "with other documents in the window",
    "batch": "with the other rows of a batch",
    "cache": "between one pass and token by token",
}


def _rotates_along_one_axis(sheet: SpecSheet, encoding: PositionEncoding) -> bool:
    """Return True for a rotation by the position itself, with the same frequencies at any length;
    False for several axes, and for other positions than the text's, as by a map."""
    if encoding.claims.num_axes != 1 or angles_of(encoding) is None:
        return False
    steps = torch.arange(2)
    is_mapped = len(encoding.passes(steps, steps)) > 1  # one pass by each map of positions
    # Frequencies that depend on the length make a cached pass differ from a whole one.
    return not is_mapped and sheet.holds["cache"] and 2 in sheet.places


class NewAngles(NamedTuple):
    """The first position at which some pair turns further than ever in training, and how many pairs
    do so before twice that position."""

    position: int
    pairs: int


def new_angles(sheet: SpecSheet, encoding: PositionEncoding) -> NewAngles | None:
    """Return where rotary pairs reach angles that training never showed; None if no pair does.

    A scaled rotation is treated as trained before its scaling. Returns None for position maps,
    several axes, and frequencies that depend on the length.
    """
    if not _rotates_along_one_axis(sheet, encoding):
        return None
    trained = sheet.shape.train_length
    waves = [math.inf if wave is None else wave for wave in sheet.wavelengths]  # None: no rotation
    firsts = []
    for wave, unscaled in zip(waves, _unscaled_wavelengths(waves, sheet.shape), strict=True):
        # Training showed `trained` / `unscaled` turns; scaled, they take this many tokens.
        if unscaled > trained and wave < math.inf:
            firsts.append(max(trained, round(trained * wave / unscaled)))
    if not firsts:
        return None
    first = min(firsts)
    return NewAngles(first, sum(position < 2 * first for position in firsts))


def _unscaled_wavelengths(waves: list[float], shape: ModelShape) -> list[float]:
    """Return the wavelengths before their scaling: those of plain RoPE if none of `waves` is
    shorter than its own."""
    plain = angles_of(create("rope", shape))
    assert plain is not None  # RoPE rotates
    of_rope = [2 * math.pi / float(f) for f in plain.inv_freq]
    # Of some of the channels, or of another base, nothing is known to be stretched.
    if len(of_rope) != len(waves):
        return waves
    # Shorter by less than a thousandth counts as equal: chosen, not derived.
    if any(wave < 0.999 * unscaled for wave, unscaled in zip(waves, of_rope, strict=True)):
        return waves
    return of_rope


def _weight_ratio_in_words(logits: float) -> str:
    """Return the ratio of weights that a difference of logits makes: "2.7 times" for 1."""
    if logits > LOGITS_OF_LARGEST_RATIO:
        return "over 10,000 times"
    ratio = math.exp(logits)
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
