"""The figures of an extension's page, each a table and its drawing."""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posenc.extend.measure.evaluation import Evaluation
from posenc.extend.recommendation import Outcome
from posenc.hf.rope_settings import RopeSetting
from posenc.report.chart import PANEL, Chart, Data, axis_names, long_table, split_by_series
from posenc.report.drawing import (
    INK,
    LineStyle,
    draw_curves_by_length,
    draw_legend_above,
    figure,
    figure_style,
    line_styles,
)
from posenc.report.report import Plot
from posenc.statistics.text_intervals import Estimate

Curves = Mapping[str, Mapping[Any, float]]
"""By method, the points of a curve: x and its y."""


def curve_plots(outcome: Outcome) -> Iterator[Plot]:
    """Yield the plots with a curve for each method: loss by position, loss by context and entropy,
    the last two only if they were measured."""
    evaluations = outcome.evaluations()
    styles = line_styles(list(evaluations))
    train_length = outcome.checkpoint.trained_length
    edges = next(iter(evaluations.values())).edges
    bucket_middles = [(a + b) / 2 for a, b in itertools.pairwise(edges)]

    def curve_chart(x_label: str, y_label: str, curves: Curves, ticks: Sequence[int]) -> Chart:
        """Return the chart of one curve per method. ticks: of the axis x, in tokens."""
        points = {name: ([*curve], [*curve.values()]) for name, curve in curves.items()}
        data = long_table(x_label, y_label, points)
        draw_arguments = {"styles": styles, "ticks": ticks, "train_length": train_length}
        return Chart(data, partial(draw_curves_by_length, **draw_arguments))

    position_label = "position in the window, tokens"
    by_position = {
        name: dict(zip(bucket_middles, _means(evaluation.loss_by_position), strict=True))
        for name, evaluation in evaluations.items()
    }
    yield Plot(
        curve_chart(position_label, "loss, nats per token", by_position, edges[1:]),
        "Loss by position, mean of each bucket; lower is better.",
        name="loss-by-position",
    )
    by_context = _losses_by_context(evaluations)
    if by_context:
        lengths = sorted(set().union(*by_context.values()))
        yield Plot(
            curve_chart(
                "context, tokens", "loss of the same last tokens, nats", by_context, lengths
            ),
            "Loss of the same target tokens as their context grows; it falls where it is used.",
            name="loss-by-context",
        )
    entropies = {
        name: dict(zip(bucket_middles, evaluation.entropy_by_bucket, strict=True))
        for name, evaluation in evaluations.items()
        if evaluation.entropy_by_bucket
    }
    if entropies:
        yield Plot(
            curve_chart(position_label, "entropy of attention, nats", entropies, edges[1:]),
            "Mean entropy of attention over layers and heads: how widely a token looks. Its "
            "exponential is a number of tokens: 3 nats are about 20.",
            name="attention-entropy",
        )


def _means(estimates: Iterable[Estimate]) -> list[float]:
    """Return the mean of each estimate, without its interval."""
    return [estimate.mean for estimate in estimates]


def _losses_by_context(evaluations: Mapping[str, Evaluation]) -> dict[str, dict[int, float]]:
    """Return by method the mean loss by length of the context; methods without it are left out."""
    losses = {}
    for name, evaluation in evaluations.items():
        by_context = evaluation.loss_by_context
        if by_context:
            losses[name] = dict(zip(by_context, _means(by_context.values()), strict=True))
    return losses


def wavelength_plots(outcome: Outcome) -> Iterator[Plot]:
    """Yield a plot of the wavelengths for each kind of layers."""
    for setting in outcome.measured["none"][0].settings:
        yield Plot(
            wavelength_chart(outcome, setting),
            "Wavelength of each pair of channels: the number of tokens for one full turn. A pair "
            "above the dotted line does not finish a turn within the training length, so the "
            f"model has not seen all of its angles: {count_unfinished_pairs(setting)} of "
            f"{setting.rotary_dim // 2} pairs never finish a turn in {setting.original_length:,} "
            "tokens.",
            name=f"wavelengths{f'-{setting.layer_type}' * bool(setting.layer_type)}",
        )


def count_unfinished_pairs(setting: RopeSetting) -> int:
    """Return how many pairs of channels finish no turn within the setting's original length."""
    return sum(
        float(f) * setting.original_length < 2 * math.pi for f in setting.frequencies().inv_freq
    )


def wavelength_chart(outcome: Outcome, unchanged_setting: RopeSetting) -> Chart:
    """Return a chart of wavelength by pair of channels, for every method with frequencies of its
    own. unchanged_setting: the setting of the unchanged model for the kind of layers to draw."""
    curves = {}
    for name, (variant, _) in outcome.measured.items():
        # Those that need a special runtime change positions and keep the model's frequencies.
        if not variant.settings or variant.needs_special_runtime:
            continue
        setting = next(s for s in variant.settings if s.layer_type == unchanged_setting.layer_type)
        inv_freq = np.array([float(f) for f in setting.frequencies(outcome.target).inv_freq])
        (rotating_pairs,) = np.nonzero(inv_freq > 0)
        curves[name] = (rotating_pairs, 2 * np.pi / inv_freq[rotating_pairs])
    data = long_table("pair of channels, fastest first", "wavelength, tokens", curves)
    draw_arguments = {
        "styles": line_styles([*outcome.measured]),
        "train_length": unchanged_setting.original_length,
    }
    return Chart(data, partial(_draw_wavelengths, **draw_arguments))


def _draw_wavelengths(data: Data, styles: Mapping[str, LineStyle], train_length: int) -> Figure:
    """Draw a curve per method, and a dotted line at the training length."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawing, axes):
        for name, part in split_by_series(data).items():
            axes.plot(
                part[x_label], part[y_label], label=name, **styles[name].arguments_for_points()
            )
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        axes.axhline(train_length, color=INK, linestyle=":", linewidth=1)
        draw_legend_above(drawing)
    return drawing


def passkey_plots(outcome: Outcome) -> Iterator[Plot]:
    """Yield one plot with a grid of depth by length for each method that was tested with passkeys;
    nothing if none was."""
    grids = {
        name: evaluation.passkey_shares
        for name, evaluation in outcome.evaluations().items()
        if evaluation.passkey_shares
    }
    if not grids:
        return
    lengths_and_depths = set().union(*grids.values())
    lengths = sorted({length for length, _ in lengths_and_depths})
    depths = sorted({depth for _, depth in lengths_and_depths})
    rows = []
    for name, grid in grids.items():
        for depth, length in itertools.product(depths, lengths):
            share = grid.get((length, depth), math.nan)
            rows.append((name, length, f"{100 * depth:.0f} %", share))
    column_names = (PANEL, "length of the text, tokens", "depth of the key", "tokens right")
    data: Data = dict[str, Any](zip(column_names, zip(*rows, strict=True), strict=True))
    mean_by_method = {name: sum(grid.values()) / len(grid) for name, grid in grids.items()}
    yield Plot(
        Chart(data, _draw_passkeys),
        "Percent of a random key's tokens that are right, by depth of the key (0 %: at the start) "
        "and length of the text.",
        "; ".join(
            f"{name}: {100 * mean:.0f} % on average" for name, mean in mean_by_method.items()
        ),
        name="passkeys",
        wide=len(grids) > 2,
    )


def _draw_passkeys(data: Data) -> Figure:
    """Draw a square per method, depths down and lengths across, with the percent in each cell."""
    x_label, y_label, share_label = axis_names(data)
    grids = split_by_series(data, PANEL)
    num_columns = min(4, len(grids))
    num_rows = -(-len(grids) // num_columns)
    lengths = dict.fromkeys(data[x_label])
    depths = dict.fromkeys(data[y_label])
    with figure_style():
        drawing = Figure(figsize=(max(5.0, 0.6 + 1.75 * num_columns), 0.7 + 1.65 * num_rows))
        panels = drawing.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
        for axes in panels.flat:
            axes.set_axis_off()
        for axes, (name, grid) in zip(panels.flat, grids.items(), strict=False):
            shares = grid[share_label].reshape(len(depths), len(lengths))
            axes.set_axis_on()
            axes.grid(False)
            # The same colours in all panels, so that the one colour bar is true for each.
            image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto")
            axes.set_title(name)
            axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
            axes.set_yticks(range(len(depths)), [*depths])
            for (y, x), share in np.ndenumerate(shares):
                axes.text(x, y, **_percent_text(share), ha="center", va="center", fontsize=8)
        drawing.supxlabel(x_label, fontsize=9.5)
        drawing.supylabel(y_label, fontsize=9.5)
        drawing.colorbar(image, ax=panels, label=share_label, shrink=0.8)  # pyright: ignore
    return drawing


def _percent_text(share: float) -> dict[str, str]:
    """Return the text of a cell and its colour, as arguments of Axes.text; NaN gives a dash."""
    if math.isnan(share):
        return {"s": "–", "color": INK}
    return {"s": f"{100 * share:.0f}", "color": "black" if share > 0.6 else "white"}
