"""Say in sentences what an encoding does with near and far, what it costs and where it ends: what
`posenc inspect encoding` prints first."""

import math
from collections.abc import Iterator

from posenc.inspect.encoding.judgement import Judgement, Limits, NearAndFar
from posenc.inspect.encoding.measurements import SpecSheet

LOGITS_OF_LARGEST_RATIO = math.log(10_000)
"""Larger differences of logits are written as "over 10,000 times" the weight."""


def answer_in_words(judgement: Judgement) -> str:
    """Return in sentences what an encoding does with near and far, what it costs and where it
    ends."""
    sheet = judgement.sheet
    before = "Before any training, which may change this, " if judgement.is_untrained else ""
    near_and_far = near_and_far_in_words(judgement.near_and_far)
    limits = limits_in_words(judgement.limits, sheet)
    ends = limits.capitalize() if limits.startswith("nothing") else f"Where it ends: {limits}"
    note = first_layer_note(judgement)
    layers = f" {note}" if note else ""
    cost = cost_in_words(judgement)
    return f"{before}{sheet.name} {near_and_far}. It costs {cost}. {ends}.{layers}"


def first_layer_note(judgement: Judgement) -> str:
    """Return what is said of a hybrid, whose encodings repeat after some layers; "" of others."""
    if judgement.layers_per_pattern == 1:
        return ""
    return f"This is its first layer: {judgement.layers_per_pattern} layers are a pattern."


def near_and_far_in_words(near_and_far: NearAndFar | None) -> str:
    """Return, as the end of a sentence, the effect of distance on the weight of a key equal to the
    query and of another one."""
    if near_and_far is None:
        return "sees a single token"
    ends = ""
    if near_and_far.last_visible_distance is not None:
        ends = f", and sees nothing beyond {near_and_far.last_visible_distance:,} tokens"
    near, far = near_and_far.near, near_and_far.far
    fall = near.equal - far.equal
    heavier, lighter = (near, far) if fall > 0 else (far, near)
    ratio = _weight_ratio_in_words(abs(fall))
    more = f"{ratio} as much weight at distance {heavier.distance:,} as at {lighter.distance:,}"
    tokens = f"{near_and_far.favours} tokens"
    match near_and_far.favours:
        case "nothing" if near_and_far.by_content:
            return f"{_BY_CONTENT_CLAUSE} all get the same weight{ends}"
        case "nothing":
            return f"treats near and far alike{ends}"
        case "neither":
            return (
                "favours neither near nor far: a token equal to the query gets weights that differ "
                f"up to {_weight_ratio_in_words(near_and_far.logit_span)} in between{ends}"
            )
    if near_and_far.by_content:
        return f"{_BY_CONTENT_CLAUSE} it favours {tokens}: {more}{ends}"
    if near_and_far.of_others == "alike":
        return f"favours {tokens}, whatever their content: one equal to the query gets {more}{ends}"
    unrelated = "much the same" if near_and_far.of_others == "level" else "less differently"
    return (
        f"favours {tokens} that match the query: they get {more}, while unrelated ones weigh "
        f"{unrelated} near and far{ends}"
    )


_BY_CONTENT_CLAUSE = (
    "weighs a key by the tokens between, not by distance itself; of equal tokens in a row"
)


def _weight_ratio_in_words(logits: float) -> str:
    """Return the ratio of weights that a difference of logits makes: "2.7 times" for 1."""
    if logits > LOGITS_OF_LARGEST_RATIO:
        return "over 10,000 times"
    ratio = math.exp(logits)
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.1f} times"


def cost_in_words(judgement: Judgement) -> str:
    """Return, as the end of "It costs", the number of parameters and the time of a layer, relative
    to one without an encoding where they are known to differ."""
    sheet = judgement.sheet
    learned = "no parameters"
    if sheet.parameters:
        learned = f"{sheet.parameters:,} parameters{' in every layer' if sheet.per_layer else ''}"
    if not judgement.takes_time:
        return f"{learned} and no measurable time"
    low, middle, high = sheet.cost
    times = f"{middle:.2f} times as long ({low:.2f} to {high:.2f})"
    return f"{learned}, and a layer takes {times}"


def limits_in_words(limits: Limits, sheet: SpecSheet) -> str:
    """Return where the encoding stops working, the hardest limit first, two at most."""
    clauses = [*_limit_clauses(limits, sheet)]
    if not clauses:
        return (
            f"nothing that was measured here ends with the {sheet.shape.train_length:,} tokens of "
            "the training"
        )
    return "; ".join(clauses[:2])


def _limit_clauses(limits: Limits, sheet: SpecSheet) -> Iterator[str]:
    """Yield a clause for each limit, the hardest first."""
    trained = sheet.shape.train_length
    if limits.failed_checks:
        yield (
            f"it breaks {len(limits.failed_checks)} of the promises that posenc's own encodings "
            f"keep, such as: {limits.failed_checks[0].replace('_', ' ')}"
        )
    if limits.last_position is not None:
        axis = " on any axis" if limits.num_axes > 1 else ""
        yield f"it accepts no position beyond {limits.last_position:,}{axis}"
    if limits.changed_by:
        yield f"its results change {' and '.join(_CAUSES[name] for name in limits.changed_by)}"
    if limits.new_angles is not None:
        yield (
            f"from position {limits.new_angles.position:,} on, {limits.new_angles.pairs} of its "
            f"{sheet.num_pairs} rotary pairs reach angles that training on {trained:,} tokens "
            "never showed"
        )
    elif limits.pairs_new_on_grids:
        yield (
            f"on grids of more than {sheet.axis_length:,} cells to a side, "
            f"{limits.pairs_new_on_grids} of its {sheet.num_pairs} rotary pairs reach angles that "
            "training never showed"
        )
    elif limits.has_new_positions:
        yield f"positions from {trained:,} on are new to a model trained on {trained:,}"
    if limits.is_blind:
        yield "by itself it does not encode order; a causal mask must"
    elif limits.last_distinct_distance is not None:
        last_distinct = f"{limits.last_distinct_distance:,}"
        yield f"beyond {last_distinct} tokens some neighbouring distances look alike to it"
    if limits.is_symmetric:
        yield "by itself it cannot distinguish before from after; a causal mask must"


_CAUSES = {
    "padding": "with padding",
    "packing": "with other documents in the window",
    "batch": "with the other rows of a batch",
    "cache": "between one pass and token by token",
}
"""What changes results and must not, by the names of SpecSheet.differences."""
