"""Draw the figures of one encoding or several from data; each function returns a matplotlib Figure.

Functions here take numbers and know no encoding.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from posenc.inspect.encoding.scores import Decay
from posenc.report.page.drawing import (
    DECORATION,
    GRID,
    LIGHT,
    figure,
    legend_above,
    level,
    line_styles,
    ordered_colours,
)

Array = np.ndarray
_PLAIN = FuncFormatter(lambda value, _: f"{value:,.0f}".replace("-", "−"))


def heat_map(values: Array, x_label: str, y_label: str, unit: str, step: int = 1) -> Figure:
    """Draw a matrix, rows downwards: positions by dimensions, queries by keys, every `step`-th. If
    values have both signs, the middle colour is zero."""
    height, width = values.shape
    with figure(x_label, y_label, grid=False) as (drawn, axes):
        largest = float(np.abs(values[np.isfinite(values)]).max(initial=1e-12))
        signed = values.min() < 0 < values.max()
        image = axes.imshow(
            values,
            aspect="auto",
            interpolation="nearest",
            extent=(-0.5 * step, (width - 0.5) * step, (height - 0.5) * step, -0.5 * step),
            vmin=-largest if signed else None,
            vmax=largest if signed else None,
        )
        drawn.colorbar(image, ax=axes, label=unit)
        frame(axes)
    return drawn


def single_lines(values: Array, picked: Sequence[int], x_label: str, what: str) -> Figure:
    """Draw the columns `picked` of values (points, lines) as curves labelled by `what` and their
    index."""
    with figure(x_label, "value added") as (drawn, axes):
        styles = line_styles([f"{what} {i}" for i in picked])
        for index, (label, look) in zip(picked, styles.items(), strict=True):
            axes.plot(values[:, index], label=label, **look.curve(len(values)))
        legend_above(drawn)
    return drawn


def wavelengths(series: Mapping[str, Sequence[float | None]], train_length: int) -> Figure:
    """Draw the wavelength of each pair, before and after scaling; None does not rotate."""
    with figure("frequency pair", "wavelength, tokens") as (drawn, axes):
        for name, style in line_styles(list(series)).items():
            waves = [math.nan if w is None else w for w in series[name]]
            axes.plot(waves, label=name, **style.curve(len(waves)))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_PLAIN)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        # Waves grow to the right: below the line it is free there.
        level(axes, train_length, f"training length, {train_length:,}")
        legend_above(drawn)
    return drawn


def bias_by_distance(values: Array, distances: Sequence[int]) -> Figure:
    """Draw values (heads, distances) in logits, one curve per head; negative distances are in the
    future."""
    ahead = "; ahead is negative" if min(distances) < 0 else ""
    with figure(f"distance to the key, tokens{ahead}", "bias, logits") as (drawn, axes):
        _plot_heads(axes, distances, values)
        axes.set_xscale("symlog", base=2, linthresh=1)
        _distance_ticks(axes, max(distances), -min(distances))
        legend_above(drawn)
    return drawn


def slopes(values: Sequence[float]) -> Figure:
    """Draw the slope of each head of ALiBi, on a logarithmic axis."""
    with figure("head", "slope, logits per token") as (drawn, axes):
        axes.vlines(range(len(values)), min(values) / 2, values, color=LIGHT[0], linewidth=1.6)
        axes.plot(values, "o", color=LIGHT[0], label="_slope")
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.3g}"))
        axes.set_xticks(range(len(values)))
    return drawn


def buckets(past: Sequence[int], future: Sequence[int] | None) -> Figure:
    """Draw T5's bucket of each distance 0, 1, 2, ... in the past, and in the future."""
    with figure("distance, tokens; the past is positive", "bucket") as (drawn, axes):
        axes.step(range(len(past)), past, where="mid", color=LIGHT[0], label="past")
        if future is not None:
            ahead = [-d for d in range(len(future))]
            axes.step(ahead, future, "--", where="mid", color=LIGHT[1], label="future")
            legend_above(drawn)
    return drawn


def rotation_steps(degrees: float, steps: int) -> Figure:
    """Draw one pair of channels of a unit vector, rotated by `degrees` per position."""
    with figure("first channel of the pair", "second channel") as (drawn, axes):
        drawn.set_size_inches(4.4, 4.4)
        circle = np.linspace(0, 2 * math.pi, 200)
        axes.plot(np.cos(circle), np.sin(circle), color=GRID, linewidth=1, label=DECORATION)
        turned = np.radians(degrees) * np.arange(steps)
        axes.plot(np.cos(turned), np.sin(turned), ".", color=GRID, label="_tips, step by step")
        for step, colour in enumerate(ordered_colours(steps)):
            angle = math.radians(step * degrees)
            end = (math.cos(angle), math.sin(angle))
            axes.annotate(
                "", end, (0, 0), arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.4}
            )
            axes.annotate(str(step), (1.13 * end[0], 1.13 * end[1]), ha="center", va="center")
        axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal")
        axes.set_xticks([-1, 0, 1])
        axes.set_yticks([-1, 0, 1])
    return drawn


def score_by_distance(decays: Mapping[str, Decay], *, same: bool) -> Figure:
    """Draw the mean score at each distance. Bands contain nine of ten random pairs (`same` False);
    or draw the score of a vector with itself (`same` True)."""
    with figure("distance to the key, tokens", "score, logits") as (drawn, axes):
        for name, style in line_styles(list(decays)).items():
            decay = decays[name]
            mean = _gaps(decay.same if same else decay.mean)
            axes.plot(decay.distances, mean, label=name, **style.curve(len(mean)))
            if not same:
                low, high = _gaps(decay.low), _gaps(decay.high)
                pale = {"color": style.color, "alpha": 0.18, "linewidth": 0}
                axes.fill_between(decay.distances, low, high, label=f"_{name}", **pale)
        axes.set_xscale("symlog", base=2, linthresh=1)
        lowest = np.nanmin([np.nanmin(_gaps(d.mean)) for d in decays.values()])
        if lowest < -50:
            axes.set_yscale("symlog", linthresh=10)
            axes.yaxis.set_major_formatter(_PLAIN)
        _distance_ticks(axes, max(d.distances[-1] for d in decays.values()))
        legend_above(drawn)
    return drawn


def precision_map(
    apart: Mapping[str, Sequence[float]], starts: Sequence[int], reach: Mapping[str, int]
) -> Figure:
    """Draw where adjacent positions collide: one row per way to compute angles, one column per
    power of two. The darker, the fewer neighbours differ. A mark in a row is its `reach`."""
    names = list(apart)
    with figure("position", "", grid=False) as (drawn, axes):
        drawn.set_figheight(1.4 + 0.42 * len(names))
        image = axes.pcolormesh(
            [*starts, 2 * starts[-1]],
            np.arange(len(names) + 1) - 0.5,
            np.array([apart[name] for name in names]),
            edgecolors="face",  # or the paper shows between the cells
            vmin=0,
            vmax=1,
        )
        axes.set_xscale("log", base=2)
        for row, name in enumerate(names):
            at = [max(1, reach[name])] * 2
            axes.plot(at, [row - 0.5, row + 0.5], color="#C24A00", linewidth=2.4, label=DECORATION)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.5, -0.5)
        ticks = starts[::8]
        axes.set_xticks(ticks, [_short(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlim(1, 2 * starts[-1])
        drawn.colorbar(image, ax=axes, label="distinct\nneighbours", ticks=[0, 0.5, 1])
        frame(axes)
    return drawn


def attention_distance(values: Array) -> Figure:
    """Draw the mean distance of attention in tokens, one dot per head; values (layers, heads)."""
    with figure("layer", "mean distance of attention, tokens") as (drawn, axes):
        layers = range(len(values))
        _plot_heads(axes, layers, values.T, "o")
        axes.set_xticks(layers)
        axes.set_ylim(bottom=0)
        legend_above(drawn)
    return drawn


def _plot_heads(axes: Axes, x: Sequence[int], values: Array, *marker: str) -> None:
    """Plot values (heads, x). The legend names as many heads as fit; colours follow their order."""
    heads = len(values)
    named = range(heads) if heads <= 4 else (0, heads // 2, heads - 1)
    for head, colour in enumerate(ordered_colours(heads)):
        label = f"{'' if head in named else '_'}head {head}"
        axes.plot(x, values[head], *marker, color=colour, label=label)


def frame(axes) -> None:
    """Show all four sides of the axes, as a picture has them."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(True)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [math.nan if v is None else v for v in values]


def _short(number: int) -> str:
    """Return 65536 as 64 Ki."""
    for power, unit in ((30, " Gi"), (20, " Mi"), (10, " Ki")):
        if number >= 2**power:
            return f"{number / 2**power:g}{unit}"
    return str(number)


def _distance_ticks(axes, last: int, ahead: int = 0) -> None:
    powers = [4**i for i in range(16)]
    ticks = [*(-p for p in powers if p <= ahead), 0, *(p for p in powers if p <= last)]
    axes.set_xticks(ticks, [f"{t:,}".replace("-", "−") for t in ticks])
    axes.minorticks_off()
