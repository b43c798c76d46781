"""Draw the figures of encodings and of models from numbers: each function of a name in `_chart`
returns a Chart, which is a table and its drawing."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from posenc.report.chart import (
    HIGH,
    LOW,
    Chart,
    Data,
    axis_names,
    long_table,
    matrix_table,
    split_by_series,
)
from posenc.report.drawing import (
    GRID,
    LIGHT_COLOURS,
    draw_legend_above,
    draw_level,
    figure,
    figure_style,
    line_styles,
    ordered_colours,
)

Array = np.ndarray
# Sizes and limits of axes in this file are chosen by eye.
_WHOLE_NUMBER_FORMATTER = FuncFormatter(lambda value, _: f"{value:,.0f}".replace("-", "−"))


def heat_map_chart(values: Array, x_label: str, y_label: str, unit: str, step: int = 1) -> Chart:
    """Draw a matrix with rows downwards, such as positions by dimensions, or queries by keys.

    values: (rows, columns). unit: what the values are, for the bar of colours. step: rows and
    columns are those of every `step`-th position, which the axes count.
    """
    height, width = values.shape
    xs = step * np.arange(width)
    ys = step * np.arange(height)
    data = matrix_table(x_label, y_label, unit, xs, ys, values)
    return Chart(data, partial(_draw_matrix, labels=(x_label, y_label), width=width, step=step))


def _draw_matrix(data: Data, labels: tuple[str, str], width: int, step: int) -> Figure:
    """Draw the heat map of a table with `width` columns; colours are symmetric about 0 for values
    of both signs."""
    unit = axis_names(data)[-1]
    values = np.asarray(data[unit]).reshape(-1, width)
    height = len(values)
    with figure(*labels, grid=False) as (drawn_figure, axes):
        # Not 0, or the colours of zeros have no range.
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=1e-12))
        has_both_signs = values.min() < 0 < values.max()
        image = axes.imshow(
            values,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5 * step, (width - 0.5) * step, (height - 0.5) * step, -0.5 * step),
            vmin=-largest if has_both_signs else None,
            vmax=largest if has_both_signs else None,
        )
        drawn_figure.colorbar(image, ax=axes, label=unit)
        show_all_sides(axes)
    return drawn_figure


def lines_chart(
    values: Array, column_indices: Sequence[int], x_label: str, line_name: str
) -> Chart:
    """Draw the columns `column_indices` of values (points, lines) as curves over the index of a
    point. Each curve is labelled by `line_name` and the index of its column."""
    curves = {
        f"{line_name} {column_index}": (range(len(values)), values[:, column_index])
        for column_index in column_indices
    }
    return Chart(long_table(x_label, "value added", curves), _draw_lines)


def _draw_lines(data: Data) -> Figure:
    """Draw the curves of a table, each with a style of its own."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        curves = split_by_series(data)
        for name, style in line_styles(list(curves)).items():
            x = curves[name][x_label]
            y = curves[name][y_label]
            axes.plot(x, y, label=name, **style.arguments_for_curve(len(x)))
        draw_legend_above(drawn_figure)
    return drawn_figure


def wavelength_chart(
    wavelengths_by_name: Mapping[str, Sequence[float | None]], train_length: int
) -> Chart:
    """Draw the wavelength of each pair in tokens, with a line at the training length.

    wavelengths_by_name: by the name of a curve, the wavelength of each pair; None for a pair that
    does not rotate.
    """
    curves = {
        name: (range(len(wavelengths)), _nan_for_none(wavelengths))
        for name, wavelengths in wavelengths_by_name.items()
    }
    data = long_table("frequency pair", "wavelength, tokens", curves)
    return Chart(data, partial(_draw_wavelengths, train_length=train_length))


def _draw_wavelengths(data: Data, train_length: int) -> Figure:
    """Draw wavelengths on a logarithmic axis, with a line at the training length."""
    drawn_figure = _draw_lines(data)
    with figure_style():
        (axes,) = drawn_figure.axes
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_WHOLE_NUMBER_FORMATTER)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        # Waves grow to the right: below the line it is free there.
        draw_level(axes, train_length, f"training length, {train_length:,}")
    return drawn_figure


def bias_chart(values: Array, distances: Sequence[int]) -> Chart:
    """Draw values (heads, distances) in logits, one curve per head; negative distances are in the
    future."""
    ahead_note = "; ahead is negative" if min(distances) < 0 else ""
    x_label = f"distance to the key, tokens{ahead_note}"
    return Chart(_table_of_heads(x_label, "bias, logits", distances, values), _draw_bias)


def _draw_bias(data: Data) -> Figure:
    """Draw a curve per head over distances, whose axis is logarithmic both ways from 0."""
    x_label, y_label = axis_names(data)
    distances = np.asarray(data[x_label])
    with figure(x_label, y_label) as (drawn_figure, axes):
        _plot_heads(axes, data)
        axes.set_xscale("symlog", base=2, linthresh=1)
        _distance_ticks(axes, distances.max(), -distances.min())
        draw_legend_above(drawn_figure)
    return drawn_figure


def slope_chart(values: Sequence[float]) -> Chart:
    """Draw the slope of each head of ALiBi, on a logarithmic axis."""
    heads = range(len(values))
    return Chart({"head": heads, "slope, logits per token": values}, _draw_slopes)


def _draw_slopes(data: Data) -> Figure:
    """Draw a dot for each head, on a stem from half of the smallest slope, as the axis has no 0."""
    x_label, y_label = axis_names(data)
    heads = data[x_label]
    values = data[y_label]
    with figure(x_label, y_label) as (drawn_figure, axes):
        axes.vlines(heads, min(values) / 2, values, color=LIGHT_COLOURS[0], linewidth=1.6)
        axes.plot(heads, values, "o", color=LIGHT_COLOURS[0], label="slope")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.3g}"))
        axes.set_xticks(heads)
    return drawn_figure


def bucket_chart(past_buckets: Sequence[int], future_buckets: Sequence[int] | None) -> Chart:
    """Draw T5's bucket of each distance 0, 1, 2, ... in the past, and in the future."""
    curves = {"past": (range(len(past_buckets)), past_buckets)}
    if future_buckets is not None:
        curves["future"] = (range(0, -len(future_buckets), -1), future_buckets)
    data = long_table("distance, tokens; the past is positive", "bucket", curves)
    return Chart(data, _draw_buckets)


def _draw_buckets(data: Data) -> Figure:
    """Draw the buckets of the past as a staircase, and those of the future, dashed, if any."""
    x_label, y_label = axis_names(data)
    curves = split_by_series(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        for colour, dashes, (name, curve) in zip(
            LIGHT_COLOURS, ("-", "--"), curves.items(), strict=False
        ):
            style = {"where": "mid", "color": colour, "linestyle": dashes, "label": name}
            axes.step(curve[x_label], curve[y_label], **style)
        if len(curves) > 1:
            draw_legend_above(drawn_figure)
    return drawn_figure


def rotation_chart(degrees: float, num_positions: int) -> Chart:
    """Draw one pair of channels of a unit vector, rotated by `degrees` per position."""
    angles = np.radians(degrees) * np.arange(num_positions)
    data = {
        "position": range(num_positions),
        "first channel of the pair": np.cos(angles),
        "second channel": np.sin(angles),
    }
    return Chart(data, _draw_steps)


def _draw_steps(data: Data) -> Figure:
    """Draw an arrow for each position from the centre of a circle, with the position at its tip."""
    position_label, x_label, y_label = data
    with figure(x_label, y_label) as (drawn_figure, axes):
        drawn_figure.set_size_inches(4.4, 4.4)
        circle_angles = np.linspace(0, 2 * math.pi, 200)
        axes.plot(np.cos(circle_angles), np.sin(circle_angles), color=GRID, linewidth=1)
        axes.plot(data[x_label], data[y_label], ".", color=GRID, label="tip")
        colours = ordered_colours(len(data[position_label]))
        for position, x, y, colour in zip(*data.values(), colours, strict=True):
            arrow_style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.4}
            axes.annotate("", (x, y), (0, 0), arrowprops=arrow_style)
            # The number stands a little outside of the circle.
            axes.annotate(str(position), (1.13 * x, 1.13 * y), ha="center", va="center")
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        axes.set_xticks([-1, 0, 1])
        axes.set_yticks([-1, 0, 1])
    return drawn_figure


def score_chart(curves: Mapping[str, Sequence[Sequence[float | None]]]) -> Chart:
    """Draw the score at each distance, a curve for each encoding.

    curves: by the encoding's name, distances in tokens and scores in logits, of one length; for a
        band around the curve also its low and its high ends. None where there is no score.
    """
    curve_columns = {
        name: (distances, *map(_nan_for_none, scores))
        for name, (distances, *scores) in curves.items()
    }
    has_bands = any(len(curve) > 2 for curve in curve_columns.values())
    band_columns = (LOW, HIGH) if has_bands else ()
    return Chart(
        long_table("distance to the key, tokens", "score, logits", curve_columns, *band_columns),
        _draw_scores,
    )


def _draw_scores(data: Data) -> Figure:
    """Draw curves over distance, with bands if the table has them; scores far below 0 on a
    logarithmic axis."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        curves = split_by_series(data)
        for name, style in line_styles(list(curves)).items():
            curve = curves[name]
            axes.plot(
                curve[x_label],
                curve[y_label],
                label=name,
                **style.arguments_for_curve(len(curve[x_label])),
            )
            if LOW in curve:
                band_style = {"color": style.color, "alpha": 0.18, "linewidth": 0}
                axes.fill_between(curve[x_label], curve[LOW], curve[HIGH], **band_style)
        axes.set_xscale("symlog", base=2, linthresh=1)
        # A linear axis would flatten the curves of all other encodings; 50 logits are chosen.
        if np.nanmin(np.asarray(data[y_label], dtype=float)) < -50:
            axes.set_yscale("symlog", linthresh=10)
            axes.yaxis.set_major_formatter(_WHOLE_NUMBER_FORMATTER)
        _distance_ticks(axes, max(data[x_label]))
        draw_legend_above(drawn_figure)
    return drawn_figure


def precision_chart(
    distinct_fractions: Mapping[str, Sequence[float]],
    starts: Sequence[int],
    last_exact: Mapping[str, int],
) -> Chart:
    """Draw where adjacent positions collide: one row per way to compute angles, one column per
    power of two. The darker, the fewer neighbours differ.

    distinct_fractions: for each way to compute angles, the fraction of neighbouring positions that
    differ just after each of `starts`. starts: positions, powers of two. last_exact: for each way,
    the last position with exact angles, which a mark shows.
    """
    fractions = np.array([*distinct_fractions.values()])
    data = matrix_table(
        "position", "row", "distinct neighbours", starts, [*distinct_fractions], fractions
    )
    return Chart(data, partial(_draw_precision, last_exact=last_exact))


def _draw_precision(data: Data, last_exact: Mapping[str, int]) -> Figure:
    """Draw a row for each way of computing angles, with a mark at the last position whose angles
    are exact."""
    x_label, y_label, unit = axis_names(data)
    row_by_name = split_by_series(data, y_label)
    names = [*row_by_name]
    starts = next(iter(row_by_name.values()))[x_label].tolist()
    with figure(x_label, "", grid=False) as (drawn_figure, axes):
        drawn_figure.set_figheight(1.4 + 0.42 * len(names))  # inches: axis and labels, and each row
        image = axes.pcolormesh(
            [*starts, 2 * starts[-1]],
            np.arange(len(names) + 1) - 0.5,
            np.array([row[unit] for row in row_by_name.values()]),
            edgecolors="face",  # or the paper shows between the cells
            vmin=0,
            vmax=1,
        )
        axes.set_xscale("log", base=2)
        for row_index, name in enumerate(names):
            mark_x = [max(1, last_exact[name])] * 2
            axes.plot(mark_x, [row_index - 0.5, row_index + 0.5], color="#C24A00", linewidth=2.4)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        ticks = starts[::8]  # more would touch
        axes.set_xticks(ticks, [_short_number(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(1, 2 * starts[-1])
        drawn_figure.colorbar(image, ax=axes, label=unit.replace(" ", "\n"), ticks=[0, 0.5, 1])
        show_all_sides(axes)
    return drawn_figure


def attention_distance_chart(values: Array) -> Chart:
    """Draw the mean distance of attention in tokens, one dot per head; values (layers, heads)."""
    y_label = "mean distance of attention, tokens"
    return Chart(_table_of_heads("layer", y_label, range(len(values)), values.T), _draw_distances)


def _draw_distances(data: Data) -> Figure:
    """Draw a dot for each head, at its mean distance, over the number of its layer."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        _plot_heads(axes, data, "o")
        axes.set_xticks(sorted(set(data[x_label])))
        axes.set_ylim(bottom=0)
        draw_legend_above(drawn_figure)
    return drawn_figure


def _table_of_heads(x_label: str, y_label: str, x: Sequence[int], values: Array) -> Data:
    """Return the table of a chart with a curve per head; values (heads, x)."""
    return long_table(x_label, y_label, {f"head {i}": (x, row) for i, row in enumerate(values)})


def _plot_heads(axes: Axes, data: Data, *marker: str) -> None:
    """Plot a curve per head in order of colours. The legend names all heads up to four, and of more
    only the first, the middle and the last.

    marker: matplotlib's format string, for dots instead of lines.
    """
    x_label, y_label = axis_names(data)
    curves = split_by_series(data)
    num_heads = len(curves)
    named_heads = range(num_heads) if num_heads <= 4 else (0, num_heads // 2, num_heads - 1)
    # matplotlib leaves a label that begins with "_" out of the legend.
    for head, (name, curve) in enumerate(curves.items()):
        style = {
            "color": ordered_colours(num_heads)[head],
            "label": name if head in named_heads else "_",
        }
        axes.plot(curve[x_label], curve[y_label], *marker, **style)


def show_all_sides(axes) -> None:
    """Show all four sides of the axes, as a picture has them."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)


def _nan_for_none(values: Sequence[float | None]) -> list[float]:
    """Return values with NaN for None, which matplotlib leaves out."""
    return [math.nan if v is None else v for v in values]


def _short_number(number: int) -> str:
    """Return a number as text, with a binary unit if it is large: "64 Ki" for 65536."""
    for power, unit in ((30, " Gi"), (20, " Mi"), (10, " Ki")):
        if number >= 2**power:
            return f"{number / 2**power:g}{unit}"
    return str(number)


def _distance_ticks(axes, farthest_past: int, farthest_ahead: int = 0) -> None:
    """Label an axis of distances at 0 and at powers of 4, up to `farthest_past` and, with
    negative numbers for the future, `farthest_ahead`."""
    powers = [4**i for i in range(16)]  # powers of 2 would touch
    ticks = [
        *(-p for p in powers if p <= farthest_ahead),
        0,
        *(p for p in powers if p <= farthest_past),
    ]
    axes.set_xticks(ticks, [f"{t:,}".replace("-", "−") for t in ticks])
    axes.minorticks_off()
