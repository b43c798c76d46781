"""The figures of a checkpoint's page, each a table and its drawing."""

from collections.abc import Iterator, Sequence

import numpy as np

from posenc.inspect.checkpoint.charts import (
    attention_chart,
    changed_layers_chart,
    changed_words_chart,
    similarity_chart,
)
from posenc.inspect.checkpoint.measurements import CheckpointSheet
from posenc.inspect.checkpoint.positions import Bias, Disentangled, PositionTable, Rotation
from posenc.inspect.checkpoint.reading import attention_by_group
from posenc.inspect.checkpoint.swap import LARGEST_ROUNDING_DIFFERENCE, Swap
from posenc.inspect.encoding import charts
from posenc.report.report import Plot

MAX_CELLS = 2_000_000
"""Squares in all attention maps of a page; with more, only some layers are drawn. Chosen, not
derived."""
_MIN_LAYERS = 3
"""Layers that are drawn however many squares they have: the first, the middle and the last."""
_MIN_CELLS_PER_LAYER = 40_000
"""Squares that a layer counts as at least: short texts, too, have no more than 50 layers drawn."""


def position_plots(sheet: CheckpointSheet) -> Iterator[Plot]:
    """Yield figures of everything that gives the model its positions: wavelengths, cosines of a
    table, biases and slopes."""
    for source in sheet.positions:
        match source:
            case Rotation():
                waves = {"as trained": source.unscaled}
                # A scaling may change nothing at this length, as dynamic NTK's.
                if source.wavelengths != source.unscaled:
                    waves[f"as it runs, {source.scaling}"] = source.wavelengths
                yield Plot(
                    charts.wavelength_chart(waves, source.trained),
                    f"Tokens per turn of each pair of channels, {source.layers}. One above the "
                    f"dotted line turns less than once in {source.trained:,} tokens; unless it is "
                    "stretched, it meets new angles beyond them.",
                    name=f"wavelengths-{source.layers.replace(' ', '-')}",
                )
            case PositionTable():
                yield Plot(
                    similarity_chart(np.array(source.similarity), source.step),
                    f"Similarity of positions: cosines between rows of {source.where}.",
                    name=f"similarity-{source.where}",
                )
            case Bias() | Disentangled() if source.values:
                averaged = ": of this sentence on average, first layer"
                yield Plot(
                    charts.bias_chart(np.array(source.values), source.distances),
                    f"The model's own bias by distance, one curve per head"
                    f"{averaged * isinstance(source, Disentangled)}; {source.where}.",
                    name=f"bias-{source.where.replace(' ', '-')}",
                )
                if isinstance(source, Bias) and source.slopes:
                    yield Plot(
                        charts.slope_chart(source.slopes),
                        "The slope of each head: logits taken off for each token of distance.",
                        name="slopes",
                    )


def distance_plots(sheet: CheckpointSheet) -> Iterator[Plot]:
    """Yield, for each stack of layers, the figure of the mean distance of attention, one dot per
    head."""
    for stack, values in sheet.reading.distances().items():
        of_stack = f" of the {stack}" if stack else ""
        yield Plot(
            charts.attention_distance_chart(values.numpy()),
            f"Mean distance of attention of each head{of_stack}.",
            name=f"attention-distance{f'-{stack}' * bool(stack)}",
        )


def attention_plots(sheet: CheckpointSheet, layers: Sequence[int] = ()) -> Iterator[str | Plot]:
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
                attention_chart(maps, labels),
                f"Attention, {of_stack}layer {layer}: rows are queries, columns the keys they "
                "look at.",
                name=f"attention{f'-{stack}' * bool(stack)}-layer-{layer}",
                wide=True,
            )


def _layers_to_draw(layers: int, cells: int) -> list[int]:
    """Return the layers to draw, of `layers`: all, or as many as MAX_CELLS allows, evenly spread
    from the first to the last, and at least three. cells: squares in the maps of one layer."""
    room = max(_MIN_LAYERS, MAX_CELLS // max(cells, _MIN_CELLS_PER_LAYER))
    if layers <= room:
        return list(range(layers))
    return sorted({round(i * (layers - 1) / (room - 1)) for i in range(room)})


def swap_plots(swap: Swap, labels: Sequence[str]) -> Iterator[Plot]:
    """Yield the two figures of how far exchanging two words moves the hidden states: by token, and
    by layer."""
    settings = {"with positions": swap.with_positions, "without positions": swap.without}
    changes = {name: change for name, change in settings.items() if change is not None}
    yield Plot(
        changed_words_chart({name: change.by_group for name, change in changes.items()}, labels),
        "How far the last layer's state of each token moves when the words change places.",
        name="changed-words",
        wide=len(labels) > 20,  # chosen by eye
    )
    whose_state = "the last token's state" if swap.causal else "any token's state, the largest"
    caption = f"By layer: how far {whose_state} moves."
    yield Plot(
        changed_layers_chart(
            {n: swap.by_layer(change) for n, change in changes.items()}, LARGEST_ROUNDING_DIFFERENCE
        ),
        caption,
        caption,  # without numbers: the digits of rounding differ between machines
        name="changed-layers",
    )
