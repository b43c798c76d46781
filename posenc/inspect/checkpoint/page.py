"""Build inspect.html of a checkpoint."""

from collections.abc import Iterator, Sequence

import numpy as np

from posenc.inspect.checkpoint import captions, figures
from posenc.inspect.checkpoint import words as rows
from posenc.inspect.checkpoint.answer import answer, extend_command, who_saw_whom
from posenc.inspect.checkpoint.positions import Bias, Disentangled, Rotation, Table
from posenc.inspect.checkpoint.reading import attention_by_group
from posenc.inspect.checkpoint.sheet import Sheet
from posenc.inspect.checkpoint.swap import ROUNDING, Swap
from posenc.inspect.encoding import captions as encoding_captions
from posenc.inspect.encoding import figures as encodings
from posenc.report.page.page import Code, Facts, Headline, Items, Page, Plot
from posenc.report.page.table import Table as Rows

MOST_CELLS = 2_000_000
"""Squares in all attention maps of a page; with more, only some layers are drawn. Chosen, not
derived."""
_FEWEST_LAYERS = 3
"""Layers that are drawn however many squares they have: the first, the middle and the last."""
_LEAST_CELLS = 40_000
"""Squares that a layer counts as at least: short texts, too, have no more than 50 layers drawn."""


def make_page(sheet: Sheet, layers: Sequence[int], command: str) -> Page:
    """Build the page of a measured checkpoint, answers first.

    layers: whose attention is drawn; empty for as many as fit. command: to repeat it.
    """
    built = sheet.structure
    page = Page(
        f"What position does in {sheet.folder.resolve().name}",
        f"{built.model_type}, {built.layers} layers of {built.heads} heads. Everything here is "
        "measured.",
    )
    page.section("", *_first_answers(sheet))
    if sheet.swap:
        page.section("Who saw whom", *_exchange_blocks(sheet.swap, sheet.sentence.labels))
    page.section(
        "Where its positions live",
        Facts(rows.positions_lines(sheet.positions)),
        *position_plots(sheet),
    )
    header, lines = rows.distances_lines(sheet)
    page.section(
        "How far attention looks",
        Rows(header, lines, "Mean distance of attention in tokens, over all queries of the text."),
        *distance_plots(sheet),
    )
    page.section("Attention", *attention_plots(sheet, layers))
    page.section(
        "What it read",
        *([sheet.reason] if sheet.reason else []),
        Facts({"text": sheet.sentence.text, "tokens": " | ".join(sheet.sentence.labels)}),
    )
    page.section("How it is built", Facts(rows.structure_lines(sheet)))
    page.section("How to repeat it", Code(command))
    return page


def _first_answers(sheet: Sheet) -> Iterator[str | Headline | Code]:
    """Yield the answers, and the command that tries twice the length."""
    yield Headline(answer(sheet.positions, sheet.longest))
    if sheet.swap:
        yield Headline(who_saw_whom(sheet.swap))
    line = extend_command(sheet.folder, sheet.positions, sheet.structure, sheet.longest)
    if line is not None:
        yield "To try twice the length, measure the methods on text of yours:"
        yield Code(f"{line} --text FILE")


def _exchange_blocks(swap: Swap, labels: Sequence[str]) -> Iterator[str | Items | Rows | Plot]:
    """Yield what the exchange of two words changes: words, a table and curves."""
    yield (
        f"The tokens of {swap.words[0]} and {swap.words[1]} change places; no other token is "
        "touched. A state is the vector that a layer hands on for a token; it is compared with the "
        f"state of the same word before. Without positions: {removed_in_words(swap)}."
    )
    yield Items(swap.verdicts)
    header, lines = rows.exchange_lines(swap)
    yield Rows(
        header,
        lines,
        "The largest change: of states after the first layer and the last, relative to their "
        "length; of a logit; from the old prediction to the new one.",
    )
    yield from swap_plots(swap, labels)


def removed_in_words(swap: Swap) -> str:
    """Return which positions were removed for the second run, in words."""
    if not swap.removed:
        return "nothing could be taken out"
    more = f" and {len(swap.removed) - 1} more" if len(swap.removed) > 1 else ""
    return f"the same weights without {swap.removed[0]}{more}"


def position_plots(sheet: Sheet) -> Iterator[Plot]:
    """Yield figures of everything that gives the model its positions: wavelengths, cosines of a
    table, biases and slopes."""
    for kind in sheet.positions:
        match kind:
            case Rotation():
                waves = {"unscaled": kind.unscaled}
                if kind.scaling != "none":
                    waves[f"as it runs, {kind.scaling}"] = kind.wavelengths
                yield Plot(
                    encodings.wavelengths(waves, kind.trained),
                    f"Tokens per turn of each pair of channels, {kind.layers}. One above the "
                    f"dotted line turns less than once in {kind.trained:,} tokens; unless it is "
                    "stretched, it meets new angles beyond them.",
                    f"{len(kind.unfinished)} of {len(kind.unscaled)} pairs lie above the line of "
                    f"{kind.trained} tokens.",
                    encoding_captions.in_wavelengths(waves, kind.trained),
                    f"wavelengths-{kind.layers.replace(' ', '-')}",
                )
            case Table():
                yield Plot(
                    figures.similarity(np.array(kind.similarity), kind.step),
                    f"Similarity of positions: cosines between rows of {kind.where}.",
                    f"Heat map; neighbouring rows have cosine {kind.neighbours:.3f} on average.",
                    encoding_captions.in_similarity(np.array(kind.similarity), kind.step),
                    f"similarity-{kind.where}",
                )
            case Bias() | Disentangled() if kind.values:
                averaged = ": of this sentence on average, first layer"
                yield Plot(
                    encodings.bias_by_distance(np.array(kind.values), kind.distances),
                    f"The model's own bias by distance, one curve per head"
                    f"{averaged * isinstance(kind, Disentangled)}; {kind.where}.",
                    f"{len(kind.values)} curves from distance {kind.distances[0]} to "
                    f"{kind.distances[-1]}.",
                    encoding_captions.in_bias(np.array(kind.values), kind.distances),
                    f"bias-{kind.where.replace(' ', '-')}",
                )
                if isinstance(kind, Bias) and kind.slopes:
                    yield Plot(
                        encodings.slopes(kind.slopes),
                        "The slope of each head: logits taken off for each token of distance.",
                        kind.settings,
                        encoding_captions.in_slopes(kind.slopes),
                        "slopes",
                    )


def distance_plots(sheet: Sheet) -> Iterator[Plot]:
    """Yield, for each stack of layers, the figure of the mean distance of attention, one dot per
    head."""
    for stack, values in sheet.reading.distances().items():
        of_stack = f" of the {stack}" if stack else ""
        yield Plot(
            encodings.attention_distance(values.numpy()),
            f"Mean distance of attention of each head{of_stack}.",
            f"Dots by layer, from {values.min():.1f} to {values.max():.1f} tokens.",
            encoding_captions.in_attention_distance(values.numpy()),
            f"attention-distance{f'-{stack}' * bool(stack)}",
        )


def attention_plots(sheet: Sheet, layers: Sequence[int] = ()) -> Iterator[str | Plot]:
    """Yield for each layer that is drawn a figure of the attention of all its heads, after a note
    if some layers are left out.

    layers: to draw; empty for as many as fit.
    """
    sentence = sheet.sentence
    for stack, weights in sheet.reading.attention.items():
        count, heads = weights.shape[:2]
        if layers:  # of a stack with fewer layers, those that it has
            drawn = sorted(layer for layer in set(layers) if layer < count)
        else:
            drawn = _layers_to_draw(count, heads * len(sentence.labels) ** 2)
        if len(drawn) != count:
            yield f"{len(drawn)} of {count} layers are drawn; choose others with --layer."
        of_stack = f"{stack}, " if stack else ""
        labels = sentence.labels
        if stack == "decoder":  # its queries and keys are one token behind
            labels = ("[start]", *labels[:-1])
        for layer in drawn:
            maps = attention_by_group(weights[layer], sentence.groups).numpy()
            yield Plot(
                figures.attention_of_heads(maps, labels),
                f"Attention, {of_stack}layer {layer}: rows are queries, columns the keys they "
                "look at.",
                f"{heads} maps of {len(labels)} by {len(labels)} tokens.",
                captions.in_attention(maps),
                f"attention{f'-{stack}' * bool(stack)}-layer-{layer}",
                wide=True,
            )


def _layers_to_draw(layers: int, cells: int) -> list[int]:
    """Return the layers to draw, of `layers`: all, or as many as MOST_CELLS allows, evenly spread
    from the first to the last, and at least three. cells: squares in the maps of one layer."""
    room = max(_FEWEST_LAYERS, MOST_CELLS // max(cells, _LEAST_CELLS))
    if layers <= room:
        return list(range(layers))
    return sorted({round(i * (layers - 1) / (room - 1)) for i in range(room)})


def _change_in_words(change: float) -> str:
    """Return a relative change in one digit; "rounding" for one so small that its digits differ
    between machines."""
    return "rounding" if 0 < change < ROUNDING else f"{change:.1g}"


def swap_plots(swap: Swap, labels: Sequence[str]) -> Iterator[Plot]:
    """Yield the two figures of how far exchanging two words moves the hidden states: by token, and
    by layer."""
    settings = {"with positions": swap.with_positions, "without positions": swap.without}
    changes = {name: change for name, change in settings.items() if change is not None}
    yield Plot(
        figures.changed_words({n: c.by_group for n, c in changes.items()}, labels),
        "How far the last layer's state of each token moves when the words change places.",
        "; ".join(f"{name} up to {max(c.by_group):.2g}" for name, c in changes.items()),
        captions.in_changed_words({n: c.by_group for n, c in changes.items()}, labels),
        "changed-words",
        wide=len(labels) > 20,  # chosen by eye
    )
    which = "the last token's state" if swap.causal else "any token's state, the largest"
    by_layer = {n: c.last_by_layer if swap.causal else c.all_by_layer for n, c in changes.items()}
    yield Plot(
        figures.changed_layers(by_layer, ROUNDING),
        f"By layer: how far {which} moves.",
        "; ".join(f"{n}: {', '.join(map(_change_in_words, vs))}" for n, vs in by_layer.items()),
        captions.in_changed_layers(by_layer, ROUNDING),
        "changed-layers",
    )
