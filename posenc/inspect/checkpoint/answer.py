"""Say in sentences up to which length a model works, and what exchanging two words changes: what
`posenc inspect model` prints first."""

from collections.abc import Sequence

from posenc.inspect.checkpoint.judgement import Exchange
from posenc.inspect.checkpoint.positions import Bias, Disentangled, Kind, Rotation, Table
from posenc.inspect.checkpoint.swap import Change, Swap


def answer_in_words(kinds: Sequence[Kind], longest: int | None) -> str:
    """Return sentences: how far the model was trained, and which part of it breaks beyond.

    longest: tokens that the config allows, None without a limit.
    """
    if not kinds:
        allowed = "" if longest is None else f" Its config allows {longest:,} tokens."
        return (
            "posenc finds nothing that gives this model positions; an exchange of words "
            f"shows whether order matters to it.{allowed}"
        )
    return " ".join(dict.fromkeys(_limit_of_part(kind) for kind in kinds))


def _limit_of_part(kind: Kind) -> str:
    """Return a sentence: up to which length one kind of the model's positions works."""
    match kind:
        case Rotation():
            return f"{_limit_of_rotation(kind)} {kind.differs}".rstrip()
        case Table():
            return (
                f"It knows {kind.rows:,} positions, the rows of {kind.where}: at token "
                f"{kind.rows + 1:,} it has no row and cannot read on."
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


def _limit_of_rotation(kind: Rotation) -> str:
    """Return a sentence: up to which length the angles of a rotation stay in the range that
    training showed."""
    pairs = len(kind.wavelengths)
    new = len(kind.new_angles)
    where = "" if kind.layers == "all layers" else f" ({kind.layers})"
    start = f"Trained on {kind.trained:,} tokens{where}"
    leaving = f"{new} of its {pairs} rotary pairs {'leaves its' if new == 1 else 'leave their'}"
    if kind.longest > kind.trained:
        start += f" and stretched to {kind.longest:,} by {kind.scaling}"
        if not new:
            return f"{start}: up to there all {pairs} rotary pairs stay in their trained range."
        return f"{start}: up to there {leaving} trained range."
    if not new:
        return f"{start}: all {pairs} rotary pairs completed a turn in training."
    return f"{start}: beyond them {leaving} trained range; expect it to break there."


def exchange_in_words(swap: Swap, exchange: Exchange) -> str:
    """Return one sentence: from which layer on states differ if two words are exchanged, with the
    model's positions and without."""
    state = "the last token's state" if swap.causal else "some token's state"
    finding = (
        f"With {swap.words[0]} and {swap.words[1]} exchanged, {state} "
        f"{_difference_in_words(swap, swap.with_positions, exchange.first_with)}"
    )
    if swap.without is None:
        return f"{finding}; nothing of its positions is known to be removable."
    without = _difference_in_words(swap, swap.without, exchange.first_without)
    return f"{finding}; without positions it {without}."


def _difference_in_words(swap: Swap, change: Change, first: int | None) -> str:
    """Return, as the end of a sentence, from which layer on states differ, and by how much in the
    last."""
    if first is None:
        return "stays the same in all layers"
    last = swap.by_layer(change)[-1]
    return f"differs from layer {first} on, by {last:.2g} of its norm in the last layer"
