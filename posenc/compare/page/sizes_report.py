"""The page of a ladder of sizes: each lead over size with its slope."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from matplotlib.figure import Figure

from posenc.compare.results import Study, with_labels
from posenc.compare.rows import rows_of
from posenc.report.chart import Chart, Data, long_table
from posenc.report.drawing import (
    HOVER_PREFIX,
    LineStyle,
    axis_names,
    draw_legend_above,
    figure,
    ranked_styles,
    split_by_series,
)
from posenc.report.report import Heading, Number, Plot, Report, Section, Table, Value

_PLACES = (("near", "at the training length"), ("far", "on far bytes"))
"""Fields of SizeLosses, and where these losses are, in words."""
_HOW_TO_READ = (
    "A lead is by how many bits per byte a row is ahead of the best other row in models of one "
    "size; below 0 it is behind. The slope is its change with each doubling of the parameters, by "
    "least squares over all sizes. All sizes have as many training tokens for each parameter."
)


@dataclass(frozen=True)
class SizeLosses:
    """Mean losses over seeds in models of one size, by row.

    parameters: of the smallest model, an encoding's own included.
    near, far: at the training length, and of far bytes in the longest windows.
    """

    parameters: int
    near: Mapping[str, float]
    far: Mapping[str, float]


def losses_of_size(study: Study) -> SizeLosses:
    """Return the mean losses of a study's rows, with the labels of the user."""
    rows = rows_of(with_labels(study))
    near: dict[str, list[float]] = {}
    far: dict[str, list[float]] = {}
    for row in rows:
        if row.near.bits_per_byte is not None:
            near.setdefault(row.name, []).append(row.near.bits_per_byte)
        score = row.far.get(max(row.trial.test_lengths))
        if score is not None and score.far is not None:
            far.setdefault(row.name, []).append(score.far)
    return SizeLosses(
        min((row.parameters for row in rows), default=0),
        {name: fmean(bits) for name, bits in near.items()},
        {name: fmean(bits) for name, bits in far.items()},
    )


def leads_over_size(sizes: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return by how many bits each row is ahead of the best other row, at each size; negative where
    it is behind. Rows that a size lacks are left out.

    sizes: parameters and losses by row, at least two rows.

    >>> leads_over_size([(1000, {"a": 2.0, "b": 2.5}), (2000, {"a": 2.0, "b": 1.75})])
    {'a': [0.5, -0.25], 'b': [-0.5, 0.25]}
    """
    names = [name for name in sizes[0][1] if all(name in losses for _, losses in sizes)]
    if len(names) < 2:
        return {}
    leads: dict[str, list[float]] = {}
    for name in names:
        leads[name] = [
            min(losses[other] for other in names if other != name) - losses[name]
            for _, losses in sizes
        ]
    return leads


def slope_per_doubling(parameters: Sequence[int], leads: Sequence[float]) -> float | None:
    """Return the change of a lead with each doubling of the parameters, by least squares; None for
    fewer than two sizes that differ.

    >>> slope_per_doubling([1000, 2000, 4000], [0.3, 0.2, 0.1])
    -0.1
    """
    x = [math.log2(count) for count in parameters]
    middle = fmean(x)
    spread = sum((each - middle) ** 2 for each in x)
    if not spread > 0:
        return None
    slope = sum((each - middle) * lead for each, lead in zip(x, leads, strict=True)) / spread
    return round(slope, 10)


def report_of_ladder(sizes: Sequence[SizeLosses]) -> Report:
    """Return the report of sizes, smallest first."""
    sections = []
    sentences = []
    for place, words in _PLACES:
        losses = [(size.parameters, getattr(size, place)) for size in sizes]
        leads = leads_over_size(losses)
        if not leads:
            continue
        parameters = [count for count, _ in losses]
        sentences.append(lead_sentence(parameters, leads, words))
        table = _leads_table(parameters, leads, losses, place, words)
        plot = Plot(
            chart_of_leads(parameters, leads), f"Lead of each row {words}, by size.", name=place
        )
        sections.append(Section(words.capitalize(), [table, plot]))
    sections.append(Section("", [_HOW_TO_READ], detail=True))
    headline = " ".join(sentences) or "No two rows finished in all sizes, so no lead is known."
    counts = " and ".join(f"{size.parameters:,}" for size in sizes)
    facts = {"answer": headline, "sizes": list(sizes)}
    return Report("Leads by size", headline, facts, sections, f"Models of {counts} parameters.")


def lead_sentence(
    parameters: Sequence[int], leads: Mapping[str, Sequence[float]], where: str
) -> str:
    """Return in words how the lead of the row that is first in the largest models changes.

    >>> lead_sentence([200_000, 800_000], {"t5": [0.05, 0.02], "rope": [-0.05, -0.02]}, "far")
    't5 leads by 0.05 at 0.2 M, 0.02 at 0.8 M far (-0.015 for each doubling of the size).'
    """
    first = max(leads, key=lambda name: leads[name][-1])
    values = []
    last_verb = ""
    for count, lead in zip(parameters, leads[first], strict=True):
        verb = "is behind by " if lead < 0 else "leads by "
        values.append(f"{'' if verb == last_verb else verb}{abs(lead):.2f} at {count / 1e6:.1f} M")
        last_verb = verb
    text = ", ".join(values)
    slope = slope_per_doubling(parameters, leads[first])
    changes = "" if slope is None else f" ({slope:+.3f} for each doubling of the size)"
    return f"{first} {text} {where}{changes}."


def _leads_table(
    parameters: Sequence[int],
    leads: Mapping[str, Sequence[float]],
    losses: Sequence[tuple[int, Mapping[str, float]]],
    place: str,
    where: str,
) -> Table:
    """Return the table of losses and leads, a row for each row of the studies; the first in the
    largest models stands first."""
    header = ["row"]
    header += [Heading(f"{count / 1e6:.1f} M", "bits per byte; lead") for count in parameters]
    header.append(Heading("slope", "of the lead, for each doubling"))
    rows: list[list[Value]] = []
    for name in sorted(leads, key=lambda name: -leads[name][-1]):
        row: list[Value] = [name]
        for (_, of_size), lead in zip(losses, leads[name], strict=True):
            row.append(Number(of_size[name], form=".3f", unit=f" ({lead:+.3f})"))
        slope = slope_per_doubling(parameters, leads[name])
        row.append(None if slope is None else Number(slope, form="+.3f"))
        rows.append(row)
    return Table(header, rows, f"Losses and leads {where}.", cards=True, name=f"leads-{place}")


def chart_of_leads(parameters: Sequence[int], leads: Mapping[str, Sequence[float]]) -> Chart:
    """Return the chart of the lead of each row over the number of parameters."""
    best_first = sorted(leads, key=lambda name: -leads[name][-1])
    curves = {name: (list(parameters), list(leads[name])) for name in best_first}
    table = long_table("parameters", "lead, bits per byte", curves)
    return Chart(table, partial(_draw_leads, styles=ranked_styles(best_first)))


def _draw_leads(data: Data, styles: Mapping[str, LineStyle]) -> Figure:
    """Draw the table of `chart_of_leads` over a logarithmic axis, with a line at no lead."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn, axes):
        axes.axhline(0, color="gray", linewidth=0.7)
        for name, part in split_by_series(data).items():
            look = styles[name].arguments_for_points()
            axes.plot(part[x_label], part[y_label], label=name, gid=HOVER_PREFIX + name, **look)
        axes.set_xscale("log")
        draw_legend_above(drawn)
    return drawn
