"""Answer in plain words how far a checkpoint was trained, what happens beyond, and which word
saw which."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from posenc.hf.tables import FAMILIES
from posenc.inspect.checkpoint.positions import (
    FIXED_ROTATIONS,
    Bias,
    Disentangled,
    Kind,
    Rotation,
    Table,
)
from posenc.inspect.checkpoint.structure import Structure
from posenc.inspect.checkpoint.swap import ROUNDING, Change, Swap


def answer(kinds: Sequence[Kind], longest: int | None) -> str:
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
    pairs, new = len(kind.wavelengths), len(kind.new_angles)
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


def extend_command(
    folder: Path, kinds: Sequence[Kind], built: Structure, longest: int | None
) -> str | None:
    """Return the command line that extends the model in `folder` to twice its length; None if
    `posenc extend` cannot, or the config names no longest length."""
    rotations = [kind for kind in kinds if isinstance(kind, Rotation)]
    if any(kind.differs for kind in rotations):
        return None
    has_rotation_settings = rotations and built.model_type not in FIXED_ROTATIONS
    if longest is None or not (has_rotation_settings or built.model_type in FAMILIES):
        return None
    return shlex.join(["posenc", "extend", str(folder), "--to", str(2 * longest)])


def who_saw_whom(swap: Swap) -> str:
    """Return one sentence: from which layer on states differ if two words are exchanged, with the
    model's positions and without."""
    state = "the last token's state" if swap.causal else "some token's state"
    finding = (
        f"With {swap.words[0]} and {swap.words[1]} exchanged, {state} "
        f"{_difference_in_words(swap.with_positions, swap.causal)}"
    )
    if swap.without is None:
        return f"{finding}; nothing of its positions is known to be removable."
    return f"{finding}; without positions it {_difference_in_words(swap.without, swap.causal)}."


def _difference_in_words(change: Change, causal: bool) -> str:
    """Return, as the end of a sentence, from which layer on states differ, and by how much in the
    last: those of the last token in a causal model, else the largest of any."""
    by_layer = change.last_by_layer if causal else change.all_by_layer
    first = next((i for i, gap in enumerate(by_layer) if not gap < ROUNDING), None)
    if first is None:
        return "stays the same in all layers"
    return f"differs from layer {first} on, by {by_layer[-1]:.2g} of its norm in the last layer"
