"""Say in sentences up to which length a model works, and what exchanging two words changes: what
`posenc inspect model` prints first."""

from collections.abc import Sequence

from posenc.inspect.checkpoint.judgement import SwapFindings
from posenc.inspect.checkpoint.positions import (
    Bias,
    Disentangled,
    PositionSource,
    PositionTable,
    Rotation,
)
from posenc.inspect.checkpoint.swap import Swap, SwapEffect


def answer_in_words(sources: Sequence[PositionSource], max_positions: int | None) -> str:
    """Return sentences: how far the model was trained, and which part of it breaks beyond.

    sources: what gives the model positions, as `find_positions` returns it. max_positions: tokens
    that the config allows; None without a limit.
    """
    if not sources:
        allowed = "" if max_positions is None else f" Its config allows {max_positions:,} tokens."
        return (
            "posenc finds nothing that gives this model positions; an exchange of words "
            f"shows whether order matters to it.{allowed}"
        )
    return " ".join(dict.fromkeys(_limit_of_part(position_source) for position_source in sources))


def _limit_of_part(position_source: PositionSource) -> str:
    """Return a sentence: up to which length one source of the model's positions works."""
    match position_source:
        case Rotation():
            return f"{_limit_of_rotation(position_source)} {position_source.differs}".rstrip()
        case PositionTable():
            rows = position_source.rows
            where = position_source.where
            return (
                f"It knows {rows:,} positions, the rows of {where}: "
                f"at token {rows + 1:,} it has no row and cannot read on."
            )
        case Bias():
            return (
                "Its positions are a bias on the scores that has a value at any distance, so that "
                "no length breaks it; how well it reads beyond its training is not measured here."
            )
        case Disentangled():
            return (
                "Its table of relative positions covers every distance, with one row for all far "
                "ones, so no length breaks it."
            )


def _limit_of_rotation(rotation: Rotation) -> str:
    """Return a sentence: up to which length the angles of a rotation stay in the range that
    training showed."""
    pairs = len(rotation.wavelengths)
    new = len(rotation.new_angles)
    where = "" if rotation.layers == "all layers" else f" ({rotation.layers})"
    start = f"Trained on {rotation.trained:,} tokens{where}"
    leaving = f"{new} of its {pairs} rotary pairs {'leaves its' if new == 1 else 'leave their'}"
    if rotation.longest > rotation.trained:
        start += f" and stretched to {rotation.longest:,} by {rotation.scaling}"
        if not new:
            return f"{start}: up to there all {pairs} rotary pairs stay in their trained range."
        return f"{start}: up to there {leaving} trained range."
    if not new:
        return f"{start}: all {pairs} rotary pairs completed a turn in training."
    return f"{start}: beyond them {leaving} trained range; expect it to break there."


def swap_in_words(swap: Swap, findings: SwapFindings) -> str:
    """Return one sentence: from which layer on states differ if two words are exchanged, with the
    model's positions and without."""
    state = "the last token's state" if swap.causal else "some token's state"
    verdict = (
        f"With {swap.words[0]} and {swap.words[1]} exchanged, {state} "
        f"{_difference_in_words(swap, swap.with_positions, findings.first_layer_with_positions)}"
    )
    if swap.without is None:
        return f"{verdict}; nothing of its positions is known to be removable."
    without = _difference_in_words(swap, swap.without, findings.first_layer_without_positions)
    return f"{verdict}; without positions it {without}."


def _difference_in_words(swap: Swap, change: SwapEffect, first: int | None) -> str:
    """Return, as the end of a sentence, from which layer on states differ, and by how much in the
    last."""
    if first is None:
        return "stays the same in all layers"
    last = swap.by_layer(change)[-1]
    return f"differs from layer {first} on, by {last:.2g} of its norm in the last layer"
