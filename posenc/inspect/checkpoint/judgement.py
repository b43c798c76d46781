"""Judge a measured checkpoint: where its heads look, what an exchange of words shows, and to which
length `posenc extend` can take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posenc.hf.learned_tables import FAMILIES
from posenc.inspect.checkpoint.measurements import CheckpointSheet
from posenc.inspect.checkpoint.positions import FIXED_ROTATIONS, PositionSource, Rotation
from posenc.inspect.checkpoint.reading import Reading, attention_by_group
from posenc.inspect.checkpoint.structure import Structure
from posenc.inspect.checkpoint.swap import LARGEST_ROUNDING_DIFFERENCE, Swap, SwapEffect

MAIN_SHARE = 0.5
"""Fraction of a head's attention above which it looks mostly at its target; chosen, not derived."""

Finding = Literal[
    "not removable",
    "blind to order",
    "order told by more",
    "last token exchanged",
    "first layer differs",
    "same after one layer",
]
"""What states without positions show. "blind to order": attention that looks both ways gives each
word's token the same state in either order; "order told by more": it does not. Under a causal mask:
"last token exchanged", so that nothing need be the same; "first layer differs", by something else
than positions; "same after one layer", as a mask alone allows."""


class SwapFindings(NamedTuple):
    """The findings of exchanging two words.

    first_with, first_without: the first layer whose states differ, with positions and without; None
    if none does, or nothing could be removed. later_differ: without positions the last token's
    state differs after some layer from the second on.
    """

    first_with: int | None
    first_without: int | None
    later_differ: bool
    finding: Finding


class LayerAttention(NamedTuple):
    """Where the heads of a layer look.

    stack: "" if there is one. distances: mean distance of attention in tokens, one for each head.
    at_first, at_itself, at_previous: how many heads look mostly at the first token, at the query's
    own, and at the one before.
    """

    stack: str
    layer: int
    distances: list[float]
    at_first: int
    at_itself: int
    at_previous: int


@dataclass(frozen=True)
class Judgement:
    """A measured checkpoint, and what follows from it.

    extends_to: twice its length in tokens, if `posenc extend` can take it there. swap_findings:
    None if no words were exchanged.
    """

    sheet: CheckpointSheet
    extends_to: int | None
    attention: list[LayerAttention]
    swap_findings: SwapFindings | None


def judge(sheet: CheckpointSheet) -> Judgement:
    """Judge the measurements of a checkpoint: to which length `posenc extend` may bring it, where
    its heads look, and whether it sees an exchange of two words. `Judgement` names the fields."""
    return Judgement(
        sheet,
        extended_length(sheet.positions, sheet.structure, sheet.longest),
        judge_attention(sheet.reading, sheet.sentence.groups),
        None if sheet.swap is None else judge_swap(sheet.swap),
    )


def extended_length(
    sources: Sequence[PositionSource], built: Structure, longest: int | None
) -> int | None:
    """Return twice the longest length; None if `posenc extend` refuses the model, or its config
    names no longest length."""
    rotations = [source for source in sources if isinstance(source, Rotation)]
    if any(source.differs for source in rotations):
        return None
    has_rotation_settings = rotations and built.model_type not in FIXED_ROTATIONS
    if longest is None or not (has_rotation_settings or built.model_type in FAMILIES):
        return None
    return 2 * longest


def judge_attention(reading: Reading, groups: Sequence[tuple[int, int]]) -> list[LayerAttention]:
    """Return where the heads of each layer look.

    groups: first token and end of each run of tokens of the text that share a character, see
    `Sentence`; a run counts as one token.
    """
    layers = []
    distances = reading.distances()
    for stack, weights in reading.attention.items():
        for layer, of_layer in enumerate(weights):
            targets = heads_by_target(attention_by_group(of_layer, groups))
            of_heads = distances[stack][layer].tolist()
            layers.append(LayerAttention(stack, layer, of_heads, *targets))
    return layers


def heads_by_target(weights: Tensor) -> tuple[int, int, int]:
    """Return how many heads attend mostly to the first token, to the query's own token, and to the
    one before, each head counted once at most.

    weights: attention (heads, queries, keys).
    """
    # The first token of a causal model sees itself only.
    queries = torch.arange(1, weights.shape[-1])
    later = queries[1:]
    of_targets = [
        weights[:, queries, 0],
        weights[:, queries, queries],
        weights[:, later, later - 1],
    ]
    counts = [0, 0, 0]
    for head in range(len(weights)):
        target_fractions = [w[head].mean().item() if w.shape[-1] else 0.0 for w in of_targets]
        largest = max(target_fractions)
        if largest > MAIN_SHARE:
            counts[target_fractions.index(largest)] += 1
    first, itself, previous = counts
    return first, itself, previous


def judge_swap(swap: Swap) -> SwapFindings:
    """Return from which layer on states differ, and what they show without positions."""
    first_with = _first_difference(swap, swap.with_positions)
    if swap.without is None:
        return SwapFindings(first_with, None, False, "not removable")
    later = max(swap.without.last_by_layer[2:], default=0.0)
    return SwapFindings(
        first_with,
        _first_difference(swap, swap.without),
        later >= LARGEST_ROUNDING_DIFFERENCE,
        _finding(swap, swap.without),
    )


def _first_difference(swap: Swap, change: SwapEffect) -> int | None:
    """Return the first layer whose states differ by LARGEST_ROUNDING_DIFFERENCE or more, or by NaN;
    None if none."""
    for layer, gap in enumerate(swap.by_layer(change)):
        if not gap < LARGEST_ROUNDING_DIFFERENCE:
            return layer
    return None


def _finding(swap: Swap, change: SwapEffect) -> Finding:
    """Return what the states show that changed so without positions."""
    if not swap.causal:
        is_blind = max(change.all_by_layer) < LARGEST_ROUNDING_DIFFERENCE
        return "blind to order" if is_blind else "order told by more"
    if not swap.last_stays:
        return "last token exchanged"
    if change.last_by_layer[1] >= LARGEST_ROUNDING_DIFFERENCE:
        return "first layer differs"
    return "same after one layer"
