"""The words of a measured checkpoint: its judgement as a report, for the terminal, the page and
JSON."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from posenc.inspect.checkpoint.measurements import CheckpointSheet, Structure
from posenc.inspect.checkpoint.positions import (
    Bias,
    Disentangled,
    MeasuredTable,
    PositionSource,
    Rotation,
)
from posenc.inspect.checkpoint.sentences import (
    Judgement,
    SwapFindings,
    answer_in_words,
    swap_in_words,
)
from posenc.inspect.checkpoint.swap import Swap, SwapEffect
from posenc.inspect.encoding.report import ranges_in_words
from posenc.report.report import (
    Block,
    Code,
    Facts,
    Items,
    Number,
    Report,
    Section,
    Table,
    section_of_next_steps,
)

_ORIGINS = {
    "user": "",
    "default text": "No --sentence was given: in this sentence only positions tell who buys whom.",
    "default ids": "No --sentence was given: token ids spread over the vocabulary.",
}
"""Why a text was read, by its origin."""


def report_of(
    judgement: Judgement, command: str, layers: Sequence[int] = (), *, has_figures: bool
) -> Report:
    """Return the report of a checkpoint.

    command: the line that repeats it. layers: whose attention is drawn; empty for as many as fit.
    has_figures: with figures, which need matplotlib.
    """
    sheet = judgement.sheet
    structure = sheet.structure
    answers = [answer_in_words(sheet.position_sources, sheet.max_positions)]
    if sheet.swap is not None and judgement.swap_findings is not None:
        answers.append(swap_in_words(sheet.swap, judgement.swap_findings))
    return Report(
        f"What position does in {sheet.folder.resolve().name}",
        " ".join(answers),
        _facts(judgement),
        [
            *_sections(judgement, command, layers, has_figures),
            section_of_next_steps(
                [
                    "What runtimes compute from its config:",
                    Code(shlex.join(["posenc", "doctor", str(sheet.folder)])),
                ]
            ),
        ],
        f"{structure.model_type}, {structure.layers} layers of {structure.heads} heads. Everything "
        "here is measured.",
    )


def _facts(judgement: Judgement) -> dict[str, Any]:
    """Return all that was measured, by the keys of --json, with the verdicts on the exchange."""
    facts = judgement.sheet.to_json()
    swap = judgement.sheet.swap
    if swap is not None and judgement.swap_findings is not None:
        facts["swap"]["verdicts"] = verdicts_in_words(swap, judgement.swap_findings)
    return facts


def _sections(
    judgement: Judgement, command: str, layers: Sequence[int], has_figures: bool
) -> Iterator[Section]:
    """Yield the sections of the report, without those for which nothing was measured."""
    sheet = judgement.sheet
    exchange_plots = []
    position_plots = []
    distance_plots = []
    attention_plots = []
    if has_figures:
        from posenc.inspect.checkpoint import figures

        exchange_plots = (
            [*figures.swap_plots(sheet.swap, sheet.sentence.labels)] if sheet.swap else []
        )
        position_plots = [*figures.position_plots(sheet)]
        distance_plots = [*figures.distance_plots(sheet)]
        attention_plots = [*figures.attention_plots(sheet, layers)]
    if judgement.extends_to is not None:
        arguments = ["posenc", "extend", str(sheet.folder), "--to", str(judgement.extends_to)]
        advice = "To try twice the length, measure the methods on text of yours:"
        yield Section("", [advice, Code(f"{shlex.join(arguments)} --text FILE")])
    if sheet.swap is not None and judgement.swap_findings is not None:
        blocks = _exchange_blocks(sheet.swap, judgement.swap_findings)
        yield Section("Who saw whom", [*blocks, *exchange_plots])
    position_facts = Facts(positions_in_words(sheet.position_sources))
    yield Section("Where its positions live", [position_facts, *position_plots])
    yield Section("How far attention looks", [attention_table(judgement), *distance_plots])
    if attention_plots:
        yield Section("Attention", attention_plots, is_detail=True)
    origin_note = _ORIGINS[sheet.text_origin]
    labels = sheet.sentence.labels
    text_facts = Facts(
        {"text": sheet.sentence.text, f"{len(sheet.sentence)} tokens": " | ".join(labels)}
    )
    yield Section("What it read", [*([origin_note] if origin_note else []), text_facts])
    yield Section("How it is built", [Facts(structure_in_words(sheet))])
    yield Section("How to repeat it", [Code(command)], is_detail=True)


def _exchange_blocks(swap: Swap, findings: SwapFindings) -> Iterator[Block]:
    """Yield sentences and a table about what the exchange of two words changes."""
    yield (
        f"The tokens of {swap.words[0]} and {swap.words[1]} change places; no other token is "
        "touched. A state is the vector that a layer hands on for a token; it is compared with the "
        f"state of the same word before. Without positions: {_removed_in_words(swap)}."
    )
    yield Items(verdicts_in_words(swap, findings))
    all_effects = {"with positions": swap.with_positions, "without": swap.without}
    effects = {name: effect for name, effect in all_effects.items() if effect is not None}

    def row(label: str, number: Callable[[SwapEffect], float | None]) -> list[str | Number]:
        numbers = [number(effect) for effect in effects.values()]
        return [label, *(Number(n, format_spec=".2g") for n in numbers if n is not None)]

    rows = [
        row("last token, layer 1", lambda c: c.last_by_layer[1]),
        row("last token, last", lambda c: c.last_by_layer[-1]),
        row("any token, layer 1", lambda c: c.all_by_layer[1]),
        row("any token, last", lambda c: c.all_by_layer[-1]),
    ]
    caption = (
        "The largest change: of states after the first layer and the last, relative to their length"
    )
    if swap.with_positions.logits is not None:  # the model has a head
        rows.append(row("logits", lambda c: c.logits))
        rows.append(row("prediction, nats", lambda c: c.divergence))
        caption += "; of a logit; from the old prediction to the new one"
    yield Table(
        ["changed", *effects],
        rows,
        f"{caption}.",
        name="exchange",
    )


def _removed_in_words(swap: Swap) -> str:
    """Return which positions were removed for the second run, in words."""
    if not swap.removed:
        return "nothing could be taken out"
    more_note = f" and {len(swap.removed) - 1} more" if len(swap.removed) > 1 else ""
    return f"the same weights without {swap.removed[0]}{more_note}"


def verdicts_in_words(swap: Swap, findings: SwapFindings) -> list[str]:
    """Return sentences that say what the states show when two words are exchanged without
    positions."""
    effect = swap.without
    if effect is None:
        return ["Nothing of this model's positions is known to be removable."]
    first_layer_change = effect.last_by_layer[1]
    match findings.verdict:
        case "blind to order" | "order told by more":
            is_blind = findings.verdict == "blind to order"
            verdict_in_words = "is blind to order" if is_blind else "still tells order apart"
            return [
                f"Without positions every token's state goes with its word to "
                f"{max(effect.all_by_layer):.1g} in all layers: attention that looks both ways "
                f"{verdict_in_words}."
            ]
        case "last token exchanged":
            return [
                "The last token is part of an exchanged word, so that nothing need be the same "
                "there: end the text with another word or a full stop to see what the mask keeps."
            ]
        case "first layer differs":
            return [
                "Without positions the last token differs after one layer, by "
                f"{first_layer_change:.2g}: something other than positions depends on order, such "
                "as windowed attention."
            ]
    sentences = [
        "Without positions the last token is the same after one layer, to "
        f"{first_layer_change:.1g}: under a causal mask it sees the same set of tokens in either "
        "order."
    ]
    later_changes = effect.last_by_layer[2:]
    if later_changes:
        comparison_in_words = "differs" if findings.later_layers_differ else "is the same"
        sentences.append(
            f"After two layers or more it {comparison_in_words}, by up to "
            f"{max(later_changes):.2g}: tokens "
            "between the words have seen other sets, and only the mask depends on order."
        )
    return sentences


def attention_table(judgement: Judgement) -> Table:
    """Return a table with a row for each layer: the mean of its heads' mean distances from a query
    to the keys that it attends to, the heads with the smallest and the largest one, and where heads
    look."""
    rows = []
    for layer_attention in judgement.attention_by_layer:
        distances = layer_attention.distances
        nearest_head, farthest_head = (
            extreme(range(len(distances)), key=distances.__getitem__) for extreme in (min, max)
        )
        nearest_in_words, farthest_in_words = (
            f"{distances[head]:.1f} (head {head})" for head in (nearest_head, farthest_head)
        )
        mean_of_heads = Number(fmean(distances), format_spec=".1f")
        name = f"{layer_attention.stack} {layer_attention.layer}".strip()
        head_counts = [
            layer_attention.num_heads_at_first,
            layer_attention.num_heads_at_itself,
            layer_attention.num_heads_at_previous,
        ]
        rows.append([name, mean_of_heads, nearest_in_words, farthest_in_words, *head_counts])
    return Table(
        ["layer", "mean", "nearest", "farthest", "first token", "itself", "before"],
        rows,
        "Mean distance of attention in tokens, over all queries of the text: of all heads, of the "
        "nearest head and of the farthest. Then how many heads look mostly at the first token, at "
        "the token itself, and at the one before.",
        name="attention-by-layer",
    )


def structure_in_words(sheet: CheckpointSheet) -> dict[str, str]:
    """Return by name, in words, the sizes of the model and its parameters by part."""
    structure = sheet.structure
    layers_in_words = f"{structure.layers}"
    if structure.decoder_layers is not None:
        layers_in_words = (
            f"{structure.layers} of the encoder, {structure.decoder_layers} of the decoder"
        )
    heads_in_words = (
        f"{structure.heads} of {structure.head_dim}, on {structure.kv_heads} key/value heads"
    )
    facts = {
        "model": structure.model_type,
        "layers": layers_in_words,
        "heads": heads_in_words,
        "width, vocabulary": f"{structure.width:,}, {structure.vocabulary:,}",
        "longest text": f"{sheet.max_positions:,} tokens"
        if sheet.max_positions
        else "its config names no limit",
        "attention looks": "back only" if sheet.reading.causal else "both ways",
        "parameters": f"{structure.parameters:,}",
    }
    return facts | _parts_in_words(structure)


def _parts_in_words(structure: Structure) -> dict[str, str]:
    """Return, by the name of each part that has parameters, their number and their fraction of the
    total as text; positions always."""
    sizes_in_words = {}
    for part, count in structure.parts.items():
        if count or part == "positions":
            tied_note = (
                ", which are the head too" if part == "embeddings" and structure.tied else ""
            )
            sizes_in_words[f"  {part}"] = (
                f"{count:,} ({count / structure.parameters:.1%}){tied_note}"
            )
    return sizes_in_words


def positions_in_words(sources: Sequence[PositionSource]) -> dict[str, str]:
    """Return by name, in words, where the model's positions are, and their settings."""
    if not sources:
        return {"positions": "nothing that posenc knows; an exchange of words shows what they do"}
    facts: dict[str, str] = {}
    for source in sources:
        match source:
            case Rotation():
                facts |= _rotation_lines(source)
            case MeasuredTable():
                low, mean, high = source.norms
                reserved_note = (
                    f", and {source.reserved} that stand for no position" if source.reserved else ""
                )
                facts[f"table {source.where}"] = (
                    f"{source.rows:,} rows{reserved_note}; length of a row {low:.3g} to "
                    f"{high:.3g}, mean {mean:.3g}; cosine of a row with the next "
                    f"{source.neighbours:.3f}"
                )
            case Bias():
                facts[f"bias, {source.where}"] = source.settings
            case Disentangled():
                facts[f"relative table, {source.where}"] = source.settings
    return facts


def _rotation_lines(source: Rotation) -> dict[str, str]:
    """Return, by name, texts about a rotation: its settings, and the pairs that leave their trained
    range."""
    num_pairs = len(source.wavelengths)
    name = f"rotation, {source.layers}"
    theta_in_words = "none" if source.rope_theta is None else f"{source.rope_theta:,g}"
    head_dim_clause = "" if source.rotary_dim == source.head_dim else f" of {source.head_dim}"
    unfinished_in_words = f": {ranges_in_words(source.unfinished)}" if source.unfinished else ""
    new_in_words = f": {ranges_in_words(source.new_angles)}" if source.new_angles else ""
    return {
        name: f"{source.rotary_dim}{head_dim_clause} channels in {num_pairs} pairs, theta "
        f"{theta_in_words}, scaling {source.scaling}, trained on {source.trained:,} tokens, "
        f"allowed {source.longest:,}",
        f"{name}, no full turn in {source.trained:,} tokens": (
            f"{len(source.unfinished)} of {num_pairs} pairs{unfinished_in_words}"
        ),
        f"{name}, new angles at {source.beyond:,} tokens": (
            f"{len(source.new_angles)} of {num_pairs} pairs{new_in_words}"
        ),
    }
