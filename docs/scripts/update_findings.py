"""Write the figures of docs/findings.md, one for each finding, from the rows that it names; run by
`make readme` after update_numbers.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from agreement import sign_agreement
from matplotlib.figure import Figure
from update_numbers import (
    change,
    leaderboard_plan,
    published,
    published_pairs,
    rows,
    title_of,
    trained,
)

from posenc.compare.judging.context_use import context_gains
from posenc.compare.judging.near_far import encodings_best_first, standings
from posenc.compare.judging.standing import Standing
from posenc.compare.judging.summary import summarise
from posenc.compare.page import figures
from posenc.compare.page.figures import task_plots
from posenc.compare.results import Study, with_labels
from posenc.report.chart import describe_curve_ends
from posenc.report.drawing import INK, draw_legend_above, figure, line_styles, write_svg
from posenc.tasks.registry import TEXT

FIGURES = Path(__file__).parents[1] / "figures"
OF_TEXT, OF_TASKS = "code", "tasks"
"""The studies of results/leaderboard that the findings are about."""
TRAINED = "128"
"""The training length, as the tables of results/ablations have it."""


class Dot(NamedTuple):
    """A number in a row of a figure.

    half_width: half of its interval; 0 for none. kind: what its colour says.
    """

    row: str
    value: float
    half_width: float = 0.0
    kind: str = ""


Drawn = tuple[Figure, str]
"""A figure and its text alternative."""


def dots(x_label: str, found: Sequence[Dot], line: float, ticks: Sequence[float] = ()) -> Drawn:
    """Draw numbers with their intervals, a row for each name, the first one on top.

    line: a number to compare with, dotted. ticks: of an axis that is logarithmic on both sides of
    zero, but for the least of them.
    """
    names = list(dict.fromkeys(dot.row for dot in found))[::-1]
    styles = line_styles([dot.kind for dot in found])
    with figure(x_label, "", height=0.8 + 0.28 * len(names)) as (drawn, axes):
        for i, (kind, look) in enumerate(styles.items()):
            mine = [dot for dot in found if dot.kind == kind]
            shift = 0.3 * (0.5 - (i + 0.5) / len(styles))
            axes.errorbar(
                [dot.value for dot in mine],
                [names.index(dot.row) + shift for dot in mine],
                xerr=[dot.half_width for dot in mine]
                if any(dot.half_width for dot in mine)
                else None,
                label=kind or "_",
                color=look.color,
                marker=look.marker,
                linestyle="none",
            )
        axes.axvline(line, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        if ticks:
            axes.set_xscale("symlog", linthresh=min(abs(tick) for tick in ticks if tick))
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(-0.5, len(names) - 0.5)
        draw_legend_above(drawn)
    said = "; ".join(
        f"{dot.row}{', ' * bool(dot.kind)}{dot.kind} {dot.value:.3g}"
        + (f" ± {dot.half_width:.2g}" if dot.half_width else "")
        for dot in found
    )
    return drawn, f"{x_label[0].upper()}{x_label[1:]}. {said}."


def training_length() -> Drawn:
    return dots("bits per byte above the best", above_the_best(standings(text())[0]), line=0)


def above_the_best(found: Standing) -> list[Dot]:
    gaps = {name: found.gap(name) for name in found.order}
    best, *others = found.order
    return [Dot(best, 0.0), *(Dot(name, *gaps[name]) for name in others)]


def extrapolation() -> Drawn:
    found = text()
    styles = line_styles(encodings_best_first(found))
    chart = figures.chart_of_losses(figures.losses_by_length(found), styles)
    return chart.figure, f"Bits per byte by test length. {describe_curve_ends(chart.data)}"


def context() -> Drawn:
    study = text()
    gains = {name: context_gains(study, name) for name in encodings_best_first(study)}
    found = [Dot(name, gain) for name, each in gains.items() if each for gain in each[1]]
    label = "bits per byte that 1,024 instead of 128 bytes of context save"
    return dots(label, found, line=0, ticks=(-1, -0.1, -0.01, -0.001, 0, 0.001))


def tuning() -> Drawn:
    kinds = ("usual setting, rate of all", "as chosen")
    found = []
    for check in sorted(text().rates, key=lambda check: check.plain_bits or 0.0):
        assert check.plain_bits is not None
        assert check.best is not None and check.best.bits is not None
        for kind, bits in zip(kinds, (check.plain_bits, check.best.bits), strict=True):
            found.append(Dot(check.encoding, bits, 0.0, kind))
    lowest = min(dot.value for dot in found)
    return dots("bits per byte on validation text after 600 steps", found, line=lowest)


def longer_training() -> Drawn:
    both = trained(OF_TEXT)
    kinds = ("after 600 steps", "after 3,000 steps")
    found = [
        Dot(title_of(name), bits, 0.0, kind)
        for name in sorted(both, key=lambda name: both[name])
        for kind, bits in zip(kinds, both[name], strict=True)
    ]
    lowest = min(late for _, late in both.values())
    return dots("bits per byte on validation text (dotted: the lowest)", found, line=lowest)


def published_tables() -> Drawn:
    counts: dict[str, tuple[int, int, str]] = {}
    of_text = (found for found in published_pairs(OF_TEXT) if found[0].multiple)
    of_tasks = (found for found in published_pairs(OF_TASKS) if not found[0].multiple)
    for each, told in (*of_text, *of_tasks):
        name, known = each.table.partition(" (")[0], "pairs that its seeds separate"
        if not each.separated:
            known = "all pairs of a table of one seed"
        agreeing, pairs = sign_agreement(each.ours, told)
        before = counts.get(name, (0, 0, ""))
        counts[name] = agreeing + before[0], pairs + before[1], known
    found = [
        Dot(f"{name}: {agreeing} of {pairs}", agreeing / pairs, 0.0, known)
        for name, (agreeing, pairs, known) in counts.items()
    ]
    return dots("fraction in our order (dotted: 0.5)", found, line=0.5)


def scalings() -> Drawn:
    kinds = {"0": "untuned", "200": "tuned for 200 steps"}
    bits: dict[tuple[str, ...], list[float]] = {}
    for row in rows("scalings"):
        at = row["method"], row["tuning_steps"], row["length"]
        bits.setdefault(at, []).append(float(row["bits_per_byte"]))
    found = [
        Dot(method, value, 0.0, kinds[steps])
        for (method, steps, length), values in bits.items()
        if length == "512" and steps in kinds
        for value in values
    ]
    label = "bits per byte at 512 bytes (dotted: as trained, at 128)"
    return dots(label, found, line=fmean(bits["none", "0", "128"]))


def projections() -> Drawn:
    tables = {"projections_causal": "decoder", "projections_masked": "encoder"}
    shared = {"q=k": "Q = K", "k=v": "K = V", "none": "no projections"}
    found = [
        Dot(f"{name}, {said}", *change(table, TRAINED, name, f"projections_{arm}"), kind)
        for name in ("rope", "t5")
        for arm, said in shared.items()
        for table, kind in tables.items()
    ]
    found += [
        Dot(name, *change("bidirectional", TRAINED, name, "objective_masked"), "encoder, next byte")
        for name in ("sinusoidal", "alibi", "t5", "rope")
    ]
    return dots("bits per byte lost at 128 bytes", found, line=0)


def tasks() -> Drawn:
    plots = task_plots(published()[OF_TASKS])
    plot = next(plot for plot in plots if plot.name == "every-trial")
    return plot.chart.figure, plot.caption


def sizes() -> Drawn:
    """Draw how far the encodings are above the best of their size, near and far."""
    found = []
    for name, study in published().items():
        if name.startswith(leaderboard_plan.SIZES):
            size = name.removeprefix(leaderboard_plan.SIZES).replace("M", " M")
            for place, standing in zip(("near", "far"), standings(with_labels(study)), strict=True):
                found += [
                    dot._replace(row=f"{dot.row}, {place}", kind=size)
                    for dot in above_the_best(standing)
                ]
    return dots("bits per byte above the best of the size", found, line=0)


def text() -> Study:
    study = with_labels(published()[OF_TEXT]).of_task(TEXT)
    return replace(study, summary=summarise(study))


DRAWN: dict[str, Callable[[], Drawn]] = {
    "training-length": training_length,
    "extrapolation": extrapolation,
    "context": context,
    "tuning": tuning,
    "longer-training": longer_training,
    "published": published_tables,
    "scalings": scalings,
    "projections": projections,
    "tasks": tasks,
    "sizes": sizes,
}


def main(target: Path = FIGURES) -> None:
    for name, draw in DRAWN.items():
        drawn, said = draw()
        write_svg(drawn, target / f"finding-{name}.svg", said)


if __name__ == "__main__":
    main()
