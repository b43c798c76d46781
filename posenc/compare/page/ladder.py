"""The page of a ladder of sizes: each lead over size with its slope."""

from collections.abc import Mapping, Sequence
from functools import partial

from matplotlib.figure import Figure

from posenc.compare.leads import SizeLosses, leads_over_size, slope_per_doubling
from posenc.report.chart import Chart, Data, long_table
from posenc.report.drawing import (
    HOVER_PREFIX,
    LineStyle,
    axes_of,
    draw_legend_above,
    figure,
    ranked_styles,
    split_by_series,
)
from posenc.report.report import Plot, Report, Section
from posenc.report.table import Heading, Number, Table, Value

_PLACES = (("near", "at the training length"), ("far", "on far bytes"))
"""Fields of SizeLosses, and where these losses are, in words."""
_HOW_TO_READ = (
    "A lead is by how many bits per byte a row is ahead of the best other row in models of one "
    "size; below 0 it is behind. The slope is its change with each doubling of the parameters, by "
    "least squares over all sizes. All sizes have as many training tokens for each parameter."
)


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
    """Draw the lead of each row over the number of parameters."""
    best_first = sorted(leads, key=lambda name: -leads[name][-1])
    curves = {name: (list(parameters), list(leads[name])) for name in best_first}
    table = long_table("parameters", "lead, bits per byte", curves)
    return Chart(table, partial(_draw_leads, styles=ranked_styles(best_first)))


def _draw_leads(data: Data, styles: Mapping[str, LineStyle]) -> Figure:
    """Draw the table of `chart_of_leads` over a logarithmic axis, with a line at no lead."""
    x_label, y_label = axes_of(data)
    with figure(x_label, y_label) as (drawn, axes):
        axes.axhline(0, color="gray", linewidth=0.7)
        for name, part in split_by_series(data).items():
            look = styles[name].arguments_for_points()
            axes.plot(part[x_label], part[y_label], label=name, gid=HOVER_PREFIX + name, **look)
        axes.set_xscale("log")
        draw_legend_above(drawn)
    return drawn
