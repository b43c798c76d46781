"""Answer in plain words, from its spec sheet, what an encoding does with near and far, what it
costs and where it breaks."""

import math
from dataclasses import dataclass

import torch

from posenc.encodings import PerLayer, PositionEncoding, create
from posenc.inspect.encoding.measurements import SpecSheet
from posenc.inspect.encoding.precision import angles_of
from posenc.inspect.encoding.scores import Decay
from posenc.testing.layer import first_layer

LEVEL = math.log(1.25)
"""A smaller change of a score, in logits, counts as none: a quarter more weight."""
ALL = math.log(10_000)
"""Logits beyond which a softmax leaves no weight worth a number."""


@dataclass(frozen=True)
class Answer:
    """The first answers about an encoding."""

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
        said = f"{before}{self.name} {self.near_and_far}. It costs {self.cost}. {ends}."
        return said + layers

    def cells(self) -> list[str]:
        """Return the answer as the row of a table."""
        start = "before training " if self.untrained else ""
        return [self.name, start + self.near_and_far, self.cost, self.limits]


def answer(sheet: SpecSheet) -> Answer:
    """Return the first sentences about an encoding, from its spec sheet."""
    encoding = create(sheet.name, sheet.shape)
    return Answer(
        sheet.name,
        near_and_far(sheet.decay, sheet.resolution is None),
        cost(sheet),
        limits(sheet, first_layer(encoding)),
        sheet.parameters > 0,
        encoding.period if isinstance(encoding, PerLayer) else 1,
    )


def near_and_far(decay: Decay, by_content: bool) -> str:
    """Return, as the end of a sentence, the effect of distance on the weight of a key equal to the
    query and of another one."""
    seen = [
        (d, same, other)
        for d, same, other in zip(decay.distances, decay.same, decay.mean, strict=True)
        if same is not None and other is not None and d >= min(1, decay.distances[-1])
    ]
    if len(seen) < 2:
        return "sees a single token"
    (near, equal_near, other_near), (far, equal_far, other_far) = seen[0], seen[-1]
    fall, other_fall = equal_near - equal_far, other_near - other_far
    span = max(s for _, s, _ in seen) - min(s for _, s, _ in seen)
    ends = "" if far == decay.distances[-1] else f", and sees nothing beyond {far:,} tokens"
    if by_content:
        kind = (
            "weighs a key by the tokens between, not by distance itself; of equal tokens in a row"
        )
        level, favours = f"{kind} all get the same weight", f"{kind} it favours {{}}"
    else:
        level, favours = "treats near and far alike", "favours {}"
    if span <= LEVEL:
        return level + ends
    if abs(fall) <= LEVEL:
        return (
            f"favours neither near nor far: a token equal to the query gets weights that differ "
            f"up to {_times(span)} in between{ends}"
        )
    most, least = (near, far) if fall > 0 else (far, near)
    more = f"{_times(abs(fall))} as much weight at distance {most:,} as at {least:,}"
    direction = favours.format("near tokens" if fall > 0 else "far tokens")
    if by_content:
        return f"{direction}: {more}{ends}"
    if fall * other_fall > 0 and abs(other_fall) >= abs(fall) / 2:
        return f"{direction}, whatever their content: one equal to the query gets {more}{ends}"
    alike = "much the same" if abs(other_fall) <= LEVEL else "less differently"
    return (
        f"{direction} that match the query: they get {more}, while unrelated ones weigh {alike} "
        f"near and far{ends}"
    )


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
    trained, found = sheet.shape.train_length, []
    if sheet.contract:
        found.append(
            f"it breaks {len(sheet.contract)} of the promises that posenc's own encodings keep, "
            f"such as: {next(iter(sheet.contract)).replace('_', ' ')}"
        )
    if sheet.max_positions is not None:
        axis = " on any axis" if encoding.claims.num_axes > 1 else ""
        found.append(f"it accepts no position beyond {sheet.max_positions - 1:,}{axis}")
    wrong = [words for key, words in _WRONG.items() if not sheet.holds[key]]
    if wrong:
        found.append(f"its results change {' and '.join(wrong)}")
    new = new_angles(sheet, encoding)
    if new is not None:
        first, pairs = new
        found.append(
            f"from position {first:,} on, {pairs} of its {sheet.num_pairs} rotary pairs reach "
            f"angles that training on {trained:,} tokens never showed"
        )
    elif encoding.claims.num_axes == 2 and sheet.unfinished_pairs and 2 in sheet.places:
        found.append(
            f"on grids of more than {sheet.axis_length:,} cells to a side, "
            f"{len(sheet.unfinished_pairs)} of its {sheet.num_pairs} rotary pairs reach angles "
            "that training never showed"
        )
    elif 1 in sheet.places and sheet.max_positions is None:
        found.append(f"positions from {trained:,} on are new to a model trained on {trained:,}")
    told = (sheet.resolution or {}).get("float32")
    reach = min(trained, sheet.max_positions or trained)
    if sheet.direction == "blind":
        found.append("by itself it does not encode order; a causal mask must")
    elif told is not None and 2 * told.every < reach:
        found.append(f"beyond {told.every:,} tokens some neighbouring distances look alike to it")
    if sheet.direction == "symmetric":
        found.append("by itself it cannot distinguish before from after; a causal mask must")
    if not found:
        return f"nothing that was measured here ends with the {trained:,} tokens of the training"
    return "; ".join(found[:2])


_WRONG = {
    "padding": "with padding",
    "packing": "with other documents in the window",
    "batch": "with the other rows of a batch",
    "cache": "between one pass and token by token",
}


def new_angles(sheet: SpecSheet, encoding: PositionEncoding) -> tuple[int, int] | None:
    """Return the first position at which some pair turns further than ever in training, and how
    many pairs do so before twice that position. None if no pair does.

    A scaled rotation is treated as trained before its scaling. Returns None for position maps,
    several axes, and frequencies that depend on the length.
    """
    angles = angles_of(encoding)
    steps = torch.arange(2)
    mapped = len(encoding.passes(steps, steps)) > 1 if encoding.claims.num_axes == 1 else True
    if angles is None or mapped or not sheet.holds["cache"] or 2 not in sheet.places:
        return None
    plain = angles_of(create("rope", sheet.shape))
    assert plain is not None
    waves = [math.inf if wave is None else wave for wave in sheet.wavelengths]
    before = [2 * math.pi / float(f) for f in plain.inv_freq]
    ours = len(before) == len(waves) and all(
        wave >= 0.999 * unscaled for wave, unscaled in zip(waves, before, strict=True)
    )
    if not ours:  # of some of the channels, or of another base: nothing is known to be stretched
        before = waves
    trained, firsts = sheet.shape.train_length, []
    for wave, unscaled in zip(waves, before, strict=True):
        if unscaled > trained and wave < math.inf:
            firsts.append(max(trained, round(trained * wave / unscaled)))
    if not firsts:
        return None
    first = min(firsts)
    return first, sum(each < 2 * first for each in firsts)


def _times(logits: float) -> str:
    """Return a difference of logits as a ratio of weights."""
    if logits > ALL:
        return "over 10,000 times"
    ratio = math.exp(logits)
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"
