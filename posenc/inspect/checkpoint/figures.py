"""Choose the figures of a checkpoint's page, say what they show, and draw those that only it has:
attention maps, similarity of positions, and changes by an exchange of words."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from unicodedata import east_asian_width

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from posenc.inspect import charts
from posenc.inspect.checkpoint.measurements import CheckpointSheet
from posenc.inspect.checkpoint.positions import Bias, Disentangled, MeasuredTable, Rotation
from posenc.inspect.checkpoint.reading import attention_by_group
from posenc.inspect.checkpoint.swap import LARGEST_ROUNDING_DIFFERENCE, Swap
from posenc.report.chart import PANEL, Chart, Data, axis_names, long_table, split_by_series
from posenc.report.drawing import (
    LIGHT_COLOURS,
    draw_legend_above,
    draw_level,
    figure,
    figure_style,
    line_styles,
    replace_invalid_xml_characters,
)
from posenc.report.report import Plot

Array = np.ndarray
MAX_LABELS = 40
"""Tokens that an axis can name; longer axes count them. As all sizes in this file, chosen by
eye."""
_MAX_WIDTH_INCHES = 9.6
"""Total width of a layer's heads, in inches."""
MAX_CELLS = 2_000_000
"""Squares in all attention maps of a page; with more, only some layers are drawn. Chosen, not
derived."""
_MIN_LAYERS = 3
"""Layers that are drawn however many squares they have: the first, the middle and the last."""
_MIN_CELLS_PER_LAYER = 40_000
"""A layer with fewer squares counts as this many, so that no more than 50 layers of a short text
are drawn."""


def position_plots(sheet: CheckpointSheet) -> Iterator[Plot]:
    """Yield figures of everything that gives the model its positions: wavelengths, cosines of a
    table, biases and slopes."""
    for source in sheet.position_sources:
        match source:
            case Rotation():
                wavelengths_by_name = {"as trained": source.unscaled}
                # A scaling may change nothing at this length, as dynamic NTK's.
                if source.wavelengths != source.unscaled:
                    wavelengths_by_name[f"as it runs, {source.scaling}"] = source.wavelengths
                yield Plot(
                    charts.wavelength_chart(wavelengths_by_name, source.trained),
                    f"Tokens per turn of each pair of channels, {source.layers}. One above the "
                    f"dotted line turns less than once in {source.trained:,} tokens; unless it is "
                    "stretched, it meets new angles beyond them.",
                    name=f"wavelengths-{source.layers.replace(' ', '-')}",
                )
            case MeasuredTable():
                yield Plot(
                    similarity_chart(np.array(source.similarity), source.step),
                    f"Similarity of positions: cosines between rows of {source.where}.",
                    name=f"similarity-{source.where}",
                )
            case Bias() | Disentangled() if source.values:
                average_note = ": of this sentence on average, first layer"
                yield Plot(
                    charts.bias_chart(np.array(source.values), source.distances),
                    f"The model's own bias by distance, one curve per head"
                    f"{average_note * isinstance(source, Disentangled)}; {source.where}.",
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
        stack_clause = f" of the {stack}" if stack else ""
        yield Plot(
            charts.attention_distance_chart(values.numpy()),
            f"Mean distance of attention of each head{stack_clause}.",
            name=f"attention-distance{f'-{stack}' * bool(stack)}",
        )


def attention_plots(sheet: CheckpointSheet, layers: Sequence[int] = ()) -> Iterator[str | Plot]:
    """Yield for each layer that is drawn a figure of the attention of all its heads, after a note
    if some layers are left out.

    layers: to draw; empty for as many as fit.
    """
    sentence = sheet.sentence
    for stack, weights in sheet.reading.attention.items():
        num_layers, num_heads = weights.shape[:2]
        if layers:  # of a stack with fewer layers, those that it has
            drawn_layers = sorted(layer for layer in set(layers) if layer < num_layers)
        else:
            drawn_layers = _layers_to_draw(num_layers, num_heads * len(sentence.labels) ** 2)
        if len(drawn_layers) != num_layers:
            yield (
                f"{len(drawn_layers)} of {num_layers} layers are drawn; choose others with --layer."
            )
        stack_clause = f"{stack}, " if stack else ""
        labels = sentence.labels
        if stack == "decoder":  # its queries and keys are one token behind
            labels = ("[start]", *labels[:-1])
        for layer in drawn_layers:
            weights_of_groups = attention_by_group(weights[layer], sentence.groups).numpy()
            yield Plot(
                attention_chart(weights_of_groups, labels),
                f"Attention, {stack_clause}layer {layer}: rows are queries, columns the keys they "
                "look at.",
                name=f"attention{f'-{stack}' * bool(stack)}-layer-{layer}",
                wide=True,
            )


def _layers_to_draw(num_layers: int, cells_per_layer: int) -> list[int]:
    """Return the indices of the layers to draw, of `num_layers`: all, or as many as MAX_CELLS
    allows, evenly spread from the first to the last, and at least three. cells_per_layer: squares
    in the maps of one layer."""
    max_layers = max(_MIN_LAYERS, MAX_CELLS // max(cells_per_layer, _MIN_CELLS_PER_LAYER))
    if num_layers <= max_layers:
        return list(range(num_layers))
    return sorted({round(i * (num_layers - 1) / (max_layers - 1)) for i in range(max_layers)})


def swap_plots(swap: Swap, labels: Sequence[str]) -> Iterator[Plot]:
    """Yield the two figures of how far exchanging two words moves the hidden states: by token, and
    by layer.

    labels: the text of each token.
    """
    all_effects = {"with positions": swap.with_positions, "without positions": swap.without}
    effects = {name: effect for name, effect in all_effects.items() if effect is not None}
    yield Plot(
        changed_words_chart({name: effect.by_group for name, effect in effects.items()}, labels),
        "How far the last layer's state of each token moves when the words change places.",
        name="changed-words",
        wide=len(labels) > 20,  # chosen by eye
    )
    whose_state = "the last token's state" if swap.causal else "any token's state, the largest"
    caption = f"By layer: how far {whose_state} moves."
    yield Plot(
        changed_layers_chart(
            {name: swap.by_layer(effect) for name, effect in effects.items()},
            LARGEST_ROUNDING_DIFFERENCE,
        ),
        caption,
        description=caption,  # without numbers: the digits of rounding differ between machines
        name="changed-layers",
    )


def attention_chart(
    weights: Array,
    labels: Sequence[str],
    titles: Sequence[str] | None = None,
    unit: str = "attention weight",
) -> Chart:
    """Draw weights (heads, queries, keys): one square per head with the same colours, tokens on
    both axes, in any script.

    titles: of the squares; None for `head 0`, `head 1`, .... unit: what is drawn, from 0 to 1.
    """
    num_heads = len(weights)
    num_tokens = len(labels)
    token_names = np.array(labels if num_tokens <= MAX_LABELS else range(num_tokens))
    data = {
        PANEL: np.repeat(
            titles or [f"head {head}" for head in range(num_heads)], num_tokens * num_tokens
        ),
        "key": np.tile(token_names, num_heads * num_tokens),
        "query": np.tile(np.repeat(token_names, num_tokens), num_heads),
        unit: weights.ravel(),
    }
    return Chart(data, partial(_draw_heads, labels=labels))


def _draw_heads(data: Data, labels: Sequence[str]) -> Figure:
    """Draw the squares of heads in a grid, with one bar of colours."""
    num_tokens = len(labels)
    unit = axis_names(data)[-1]
    weights = np.asarray(data[unit]).reshape(-1, num_tokens, num_tokens)
    token_labels = [_shorten_label(label) for label in labels] if num_tokens <= MAX_LABELS else None
    titles = [*dict.fromkeys(data[PANEL])]
    grid = _arrange_heads(len(weights), num_tokens, token_labels)
    with figure_style():
        drawn_figure = Figure(figsize=(grid.width, grid.height))
        drawn_figure.set_layout_engine("none")  # see _Grid
        for head in range(len(weights)):
            axes = drawn_figure.add_axes(grid.rectangle(head))
            image = axes.imshow(weights[head], vmin=0, vmax=1, interpolation="nearest")
            axes.set_title(titles[head])
            axes.grid(False)
            axes.tick_params(labelsize=8, length=2)
            charts.show_all_sides(axes)
            is_lowest = head + grid.columns >= len(weights)
            _label_tokens(
                axes, num_tokens, token_labels, is_lowest, is_first=head % grid.columns == 0
            )
            if head == 0:
                bar_axes = drawn_figure.add_axes(grid.bar_rectangle())
                drawn_figure.colorbar(image, cax=bar_axes, label=unit)
        text_style = {"fontsize": "medium", "fontweight": "normal"}
        drawn_figure.supxlabel("key", x=0.5, y=0.08 / grid.height, va="bottom", **text_style)
        drawn_figure.supylabel("query", x=0.08 / grid.width, y=0.5, ha="left", **text_style)
    return drawn_figure


@dataclass(frozen=True)
class _Grid:
    """The layout of the squares of heads, in inches. It is fixed, because matplotlib's own layout
    takes seconds for this many labels.

    rows, columns: numbers of squares. side: of a square. label_room: for the names of tokens, at
    the left and at the bottom. last_row_gap: added above the last row if it is not full, because a
    square above an empty place has the names of its keys there.
    """

    rows: int
    columns: int
    side: float
    label_room: float
    last_row_gap: float
    SPACE_ABOVE = 0.3
    """For the title of a square."""
    SPACE_BESIDE = 0.12
    """Between neighbouring squares."""

    @property
    def left(self) -> float:
        """Return the left edge of the first column, after the axis's title and the names."""
        return 0.3 + self.label_room

    @property
    def width(self) -> float:
        """Return the figure's width, with room for the bar of colours at the right."""
        return self.left + self.columns * (self.side + self.SPACE_BESIDE) + 0.9

    @property
    def height(self) -> float:
        """Return the figure's height, with names and the axis's title at the bottom."""
        return (
            self.rows * (self.SPACE_ABOVE + self.side) + self.last_row_gap + self.label_room + 0.3
        )

    def rectangle(self, head: int) -> tuple[float, float, float, float]:
        """Return left, bottom, width and height of a head's square, as fractions of the figure."""
        row, column = divmod(head, self.columns)
        x = self.left + column * (self.side + self.SPACE_BESIDE)
        y = self.height - (row + 1) * (self.SPACE_ABOVE + self.side)
        if row == self.rows - 1 > 0:
            y -= self.last_row_gap
        return (
            x / self.width,
            y / self.height,
            self.side / self.width,
            self.side / self.height,
        )

    def bar_rectangle(self) -> tuple[float, float, float, float]:
        """Return left, bottom, width and height of the bar of colours, to the right of the first
        row."""
        bar_length = min(2.5, self.side)
        return (
            1 - 0.75 / self.width,
            1 - (self.SPACE_ABOVE + bar_length) / self.height,
            0.14 / self.width,
            bar_length / self.height,
        )


def _arrange_heads(num_heads: int, num_tokens: int, token_labels: Sequence[str] | None) -> _Grid:
    """Return the layout of one square per head, of `num_tokens` tokens a side, in as few rows as
    the width allows.

    token_labels: the names on the axes, None for numbers.
    """
    if token_labels is None:
        side = 2.4
        label_room = 0.3
    else:
        side = max(1.5, 0.15 * num_tokens)
        label_room = 0.1 + 0.065 * max(map(_width_in_letters, token_labels))
    max_columns = max(1, min(num_heads, int(_MAX_WIDTH_INCHES // side)))
    rows = -(-num_heads // max_columns)  # rounded up
    columns = -(-num_heads // rows)  # 2 and 2 instead of 3 and 1
    return _Grid(
        rows, columns, side, label_room, last_row_gap=label_room * bool(num_heads % columns)
    )


def _label_tokens(
    axes: Axes,
    num_tokens: int,
    token_labels: Sequence[str] | None,
    is_lowest: bool,
    *,
    is_first: bool,
) -> None:
    """Name the keys below a square of the lowest row, and the queries left of a square of the first
    column.

    num_tokens: on a side. token_labels: their names; None for numbers, where matplotlib sets them.
    """
    if not is_lowest:
        axes.set_xticks([], [], rotation=90)
    elif token_labels is not None:
        axes.set_xticks(range(num_tokens), token_labels, rotation=90)
    if not is_first:
        axes.set_yticks([], [])
    elif token_labels is not None:
        axes.set_yticks(range(num_tokens), token_labels)
    _set_wide_characters_upright(axes)


def similarity_chart(values: Array, step: int) -> Chart:
    """Draw the cosines between rows of a table of positions as a heat map.

    values: (rows, rows), of every `step`-th row of the table.
    """
    chart = charts.heat_map_chart(values, "position, tokens", "position, tokens", "cosine", step)
    return Chart(chart.data, partial(_draw_similarity, draw=chart.draw))


def _draw_similarity(data: Data, draw: Callable[[Data], Figure]) -> Figure:
    """Draw the heat map by `draw`, with whole positions on both axes."""
    drawn_figure = draw(data)
    axes = drawn_figure.axes[0]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, integer=True))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return drawn_figure


def changed_words_chart(
    changes_by_setting: Mapping[str, Sequence[float]], labels: Sequence[str]
) -> Chart:
    """Draw how far the state of each token moves when two words are exchanged, a bar per token and
    setting.

    changes_by_setting: by setting, "with positions" or "without positions", the relative change of
    each token's state. labels: the text of each token.
    """
    names = labels if len(labels) <= MAX_LABELS else range(len(labels))
    curves = {name: (names, values) for name, values in changes_by_setting.items()}
    data = long_table("token", "change of its state, relative", curves)
    return Chart(data, partial(_draw_words, labels=labels))


def _draw_words(data: Data, labels: Sequence[str]) -> Figure:
    """Draw a group of bars for each token, one bar for each setting."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        drawn_figure.set_figwidth(max(5.0, 1.2 + 0.2 * min(len(labels), MAX_LABELS)))
        bars_by_setting = split_by_series(data)
        bar_width = 0.8 / len(bars_by_setting)  # the rest is the gap to the next token
        for index, (name, bars) in enumerate(bars_by_setting.items()):
            values = bars[y_label]
            centres = np.arange(len(values)) + (index - (len(bars_by_setting) - 1) / 2) * bar_width
            axes.bar(centres, values, bar_width, color=LIGHT_COLOURS[index], label=name)
        if len(labels) <= MAX_LABELS:
            axes.set_xticks(range(len(labels)), [_shorten_label(t) for t in labels], rotation=90)
            _set_wide_characters_upright(axes)
        axes.grid(axis="x", visible=False)
        draw_legend_above(drawn_figure)
    return drawn_figure


def changed_layers_chart(
    changes_by_setting: Mapping[str, Sequence[float]], rounding: float
) -> Chart:
    """Draw how far states move when two words are exchanged, over the layers, on a logarithmic
    axis.

    changes_by_setting: by setting, "with positions" or "without positions", the relative change in
    each layer.
    rounding: changes below it are rounding; a line shows it.
    """
    curves = {name: (range(len(values)), values) for name, values in changes_by_setting.items()}
    data = long_table("layer; 0 are the embeddings", "change, relative", curves)
    return Chart(data, partial(_draw_layers, rounding=rounding))


def _draw_layers(data: Data, rounding: float) -> Figure:
    """Draw a curve of dots over layers for each setting, with a line at rounding."""
    smallest_drawn = 1e-9  # a logarithmic axis has no 0: smaller changes are drawn here
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        curves_by_setting = split_by_series(data)
        for name, style in line_styles(list(curves_by_setting)).items():
            layers = curves_by_setting[name][x_label]
            changes = curves_by_setting[name][y_label]
            axes.plot(
                layers,
                np.maximum(changes, smallest_drawn),
                label=name,
                **style.arguments_for_points(),
            )
        axes.set_yscale("log")
        axes.set_ylim(smallest_drawn / 2, 10)
        axes.set_yticks([smallest_drawn, 1e-6, 1e-3, 1], ["0", "10⁻⁶", "10⁻³", "1"])
        axes.minorticks_off()
        draw_level(axes, rounding, "below: rounding")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        draw_legend_above(drawn_figure)
    return drawn_figure


def _set_wide_characters_upright(axes: Axes) -> None:
    """Set labels of one wide character, such as a Chinese one, upright on the axis of keys, whose
    labels are vertical: it needs no more room so."""
    for label in axes.get_xticklabels():
        if len(label.get_text()) == 1 and _width_in_letters(label.get_text()) == 2:
            label.set_rotation(0)


def _shorten_label(label: str) -> str:
    """Return a label cut to 14 letters, with hidden characters as escapes."""
    return replace_invalid_xml_characters(label if len(label) <= 14 else f"{label[:13]}…")


def _width_in_letters(label: str) -> int:
    """Return the width of a label in Latin letters: a Chinese letter counts as two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in label)
