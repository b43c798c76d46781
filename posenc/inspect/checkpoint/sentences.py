"""The sentences that `posenc inspect model` prints first, and the judgement of a checkpoint that
they say: where its heads look, what an exchange of words shows, and to which length `posenc extend`
can take it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from posenc.hf.learned_tables import TABLE_OF_MODEL_TYPE
from posenc.inspect.checkpoint.measurements import CheckpointSheet, Structure
from posenc.inspect.checkpoint.positions import (
    FIXED_ROTATIONS,
    Bias,
    Disentangled,
    MeasuredTable,
    PositionSource,
    Rotation,
)
from posenc.inspect.checkpoint.reading import Reading, attention_by_group
from posenc.inspect.checkpoint.swap import LARGEST_ROUNDING_DIFFERENCE, Swap, SwapEffect

MAIN_SHARE = 0.5
"""Fraction of a head's attention above which it looks mostly at its target; chosen, not derived."""

SwapVerdict = Literal[
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

    first_layer_with_positions: the first layer whose states differ; None if none does. 0 is the
        embeddings.
    first_layer_without_positions: the same without the model's positions; None, too, if nothing
        could be removed.
    later_layers_differ: True if, without positions, the last token's state differs after some layer
        from the second on.
    verdict: what the states without positions show.
    """

    first_layer_with_positions: int | None
    first_layer_without_positions: int | None
    later_layers_differ: bool
    verdict: SwapVerdict


class LayerAttention(NamedTuple):
    """Where the heads of a layer look.

    stack: name of the stack of layers; "" if there is only one.
    layer: index of the layer in its stack.
    distances: mean distance of attention in tokens, one for each head.
    num_heads_at_first: number of heads that look mostly at the first token.
    num_heads_at_itself: number of heads that look mostly at the query's own token.
    num_heads_at_previous: number of heads that look mostly at the token before the query.
    """

    stack: str
    layer: int
    distances: list[float]
    num_heads_at_first: int
    num_heads_at_itself: int
    num_heads_at_previous: int


@dataclass(frozen=True)
class Judgement:
    """A measured checkpoint, and what follows from it.

    extends_to: twice its length in tokens, or None if `posenc extend` cannot take it there.
    attention_by_layer: where the heads of each layer look. swap_findings: None if no words were
    exchanged.
    """

    sheet: CheckpointSheet
    extends_to: int | None
    attention_by_layer: list[LayerAttention]
    swap_findings: SwapFindings | None


def judge(sheet: CheckpointSheet) -> Judgement:
    """Judge the measurements of a checkpoint: to which length `posenc extend` may bring it, where
    its heads look, and whether it sees an exchange of two words. `Judgement` names the fields."""
    return Judgement(
        sheet,
        extended_length(sheet.position_sources, sheet.structure, sheet.max_positions),
        judge_attention(sheet.reading, sheet.sentence.groups),
        None if sheet.swap is None else judge_swap(sheet.swap),
    )


def extended_length(
    sources: Sequence[PositionSource], structure: Structure, max_positions: int | None
) -> int | None:
    """Return twice the longest length in tokens; None if `posenc extend` refuses the model, or if
    its config has no limit.

    sources: what gives the model positions, as `find_positions` returns it. max_positions: tokens
    that the config allows; None without a limit.
    """
    rotations = [source for source in sources if isinstance(source, Rotation)]
    if any(source.differs for source in rotations):
        return None
    has_rotation_settings = rotations and structure.model_type not in FIXED_ROTATIONS
    if max_positions is None or not (
        has_rotation_settings or structure.model_type in TABLE_OF_MODEL_TYPE
    ):
        return None
    return 2 * max_positions


def judge_attention(reading: Reading, groups: Sequence[tuple[int, int]]) -> list[LayerAttention]:
    """Return where the heads of each layer look.

    groups: first token and end of each run of tokens of the text that share a character, see
    `Sentence`; a run counts as one token.
    """
    layer_attentions = []
    distances_by_stack = reading.distances()
    for stack, weights in reading.attention.items():
        for layer, weights_of_layer in enumerate(weights):
            head_counts = heads_by_target(attention_by_group(weights_of_layer, groups))
            mean_distances = distances_by_stack[stack][layer].tolist()
            layer_attentions.append(LayerAttention(stack, layer, mean_distances, *head_counts))
    return layer_attentions


def heads_by_target(weights: Tensor) -> tuple[int, int, int]:
    """Return how many heads attend mostly to the first token, to the query's own token, and to the
    one before, each head counted once at most.

    weights: attention (heads, queries, keys).
    """
    # The first token of a causal model sees itself only.
    queries = torch.arange(1, weights.shape[-1])
    later_queries = queries[1:]
    weights_on_targets = [
        weights[:, queries, 0],
        weights[:, queries, queries],
        weights[:, later_queries, later_queries - 1],
    ]
    counts = [0, 0, 0]
    for head in range(len(weights)):
        target_fractions = [
            w[head].mean().item() if w.shape[-1] else 0.0 for w in weights_on_targets
        ]
        largest_fraction = max(target_fractions)
        if largest_fraction > MAIN_SHARE:
            counts[target_fractions.index(largest_fraction)] += 1
    num_at_first, num_at_itself, num_at_previous = counts
    return num_at_first, num_at_itself, num_at_previous


def judge_swap(swap: Swap) -> SwapFindings:
    """Return from which layer on exchanging two words changes states, with the model's positions
    and without, and what the states without positions show."""
    first_layer_with_positions = _first_differing_layer(swap, swap.with_positions)
    if swap.without is None:
        return SwapFindings(first_layer_with_positions, None, False, "not removable")
    largest_later_change = max(swap.without.last_by_layer[2:], default=0.0)
    return SwapFindings(
        first_layer_with_positions,
        _first_differing_layer(swap, swap.without),
        largest_later_change >= LARGEST_ROUNDING_DIFFERENCE,
        _swap_verdict(swap, swap.without),
    )


def _first_differing_layer(swap: Swap, effect: SwapEffect) -> int | None:
    """Return the first layer whose states differ by LARGEST_ROUNDING_DIFFERENCE or more, or by NaN,
    after an exchange of words; None if none does. effect: what the exchange changed."""
    for layer, change in enumerate(swap.by_layer(effect)):
        if not change < LARGEST_ROUNDING_DIFFERENCE:
            return layer
    return None


def _swap_verdict(swap: Swap, effect: SwapEffect) -> SwapVerdict:
    """Return what the states show after an exchange of two words without positions. effect: what
    the exchange changed then."""
    if not swap.causal:
        is_blind = max(effect.all_by_layer) < LARGEST_ROUNDING_DIFFERENCE
        return "blind to order" if is_blind else "order told by more"
    if not swap.last_stays:
        return "last token exchanged"
    if effect.last_by_layer[1] >= LARGEST_ROUNDING_DIFFERENCE:
        return "first layer differs"
    return "same after one layer"


def answer_in_words(sources: Sequence[PositionSource], max_positions: int | None) -> str:
    """Return sentences: how long the model's training texts were, and from which length on a source
    of its positions breaks.

    sources: what gives the model positions, as `find_positions` returns it. max_positions: tokens
    that the config allows; None without a limit.
    """
    if not sources:
        limit_in_words = (
            "" if max_positions is None else f" Its config allows {max_positions:,} tokens."
        )
        return (
            "posenc finds nothing that gives this model positions; an exchange of words "
            f"shows whether order matters to it.{limit_in_words}"
        )
    has_table = any(isinstance(position_source, MeasuredTable) for position_source in sources)
    return " ".join(dict.fromkeys(_limit_of_part(source, has_table) for source in sources))


def _limit_of_part(position_source: PositionSource, has_table: bool) -> str:
    """Return a sentence that says up to which length one source of the model's positions works.

    has_table: one of the sources is a table of absolute positions, which ends.
    """
    match position_source:
        case Rotation():
            return f"{_limit_of_rotation(position_source)} {position_source.differs}".rstrip()
        case MeasuredTable():
            num_rows = position_source.rows
            where = position_source.where
            return (
                f"It knows {num_rows:,} positions, the rows of {where}: "
                f"at token {num_rows + 1:,} it has no row and cannot read on."
            )
        case Bias() | Disentangled() if has_table:
            return "Its scores also depend on the distance, which has no limit."
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
    """Return a sentence that says up to which length the angles of a rotation stay in the range
    that training showed."""
    num_pairs = len(rotation.wavelengths)
    num_new = len(rotation.new_angles)
    layers_clause = "" if rotation.layers == "all layers" else f" ({rotation.layers})"
    opening_clause = f"Trained on {rotation.trained:,} tokens{layers_clause}"
    leaving_clause = (
        f"{num_new} of its {num_pairs} rotary pairs "
        f"{'leaves its' if num_new == 1 else 'leave their'}"
    )
    if rotation.longest > rotation.trained:
        opening_clause += f" and stretched to {rotation.longest:,} by {rotation.scaling}"
        if not num_new:
            return (
                f"{opening_clause}: up to there all {num_pairs} rotary pairs stay in their "
                "trained range."
            )
        return f"{opening_clause}: up to there {leaving_clause} trained range."
    if not num_new:
        return f"{opening_clause}: all {num_pairs} rotary pairs completed a turn in training."
    return f"{opening_clause}: beyond them {leaving_clause} trained range; it may break there."


def swap_in_words(swap: Swap, findings: SwapFindings) -> str:
    """Return one sentence: from which layer on states differ if two words are exchanged, with the
    model's positions and without."""
    state_in_words = "the last token's state" if swap.causal else "some token's state"
    clause_with_positions = (
        f"With {swap.words[0]} and {swap.words[1]} exchanged, {state_in_words} "
        f"{_difference_in_words(swap, swap.with_positions, findings.first_layer_with_positions)}"
    )
    if swap.without is None:
        return f"{clause_with_positions}; nothing of its positions is known to be removable."
    difference_without_in_words = _difference_in_words(
        swap, swap.without, findings.first_layer_without_positions
    )
    return f"{clause_with_positions}; without positions it {difference_without_in_words}."


def _difference_in_words(swap: Swap, effect: SwapEffect, first_layer: int | None) -> str:
    """Return the end of a sentence: from which layer on states differ, and by how much in the last
    layer.

    effect: what an exchange of words changed. first_layer: the first layer with a difference; None
    if there is none.
    """
    if first_layer is None:
        return "stays the same in all layers"
    last_change = swap.by_layer(effect)[-1]
    return (
        f"differs from layer {first_layer} on, by {last_change:.2g} of its norm in the last layer"
    )
