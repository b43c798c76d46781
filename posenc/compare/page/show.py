"""What a reader gets of a study: the page, rows for a spreadsheet, tables on the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from posenc.compare.page import tables, task_tables
from posenc.compare.page.as_json import answer_json
from posenc.compare.results import Study, labelled
from posenc.report.files.atomic import write_atomically
from posenc.report.page.console import stdout
from posenc.report.page.progress import say
from posenc.tasks.known import TEXT


def write_page(study: Study, folder: Path, published: bool = False) -> None:
    """Write report.html, with `published` also how far it agrees with others, and results.csv."""
    from posenc.compare.judge.published import agreements
    from posenc.compare.page.page import make_page

    write_atomically(folder / "results.csv", tables.csv_text(labelled(study)))
    page = make_page(labelled(study), agreements(study) if published else None)
    page.write(folder / "report.html")


def write_figures_of(study: Study, figures: Path | None) -> list[str]:
    """Write the figures where they were asked for; what the reader must know."""
    if figures is None:
        return []
    from posenc.compare.page.page import make_page
    from posenc.report.page.figure_files import write_figures

    return [*write_figures(make_page(labelled(study)).plots(), figures), f"Figures: {figures}"]


def show_study(study: Study, folder: Path, console: Console, as_json: bool = False) -> None:
    """Print the tables, the two lines and the path of the page, or print the answer as JSON."""
    out = stdout(160)
    shown = labelled(study)
    if as_json:
        print(answer_json(shown, folder))
        return
    if study.corpus is not None:
        out.print(tables.summary_table(shown.of_task(TEXT)))
    for table in (*task_tables.task_tables(study.tasks), *tables.rate_tables(shown)):
        out.print(table)
    for line in (
        study.recommendation,
        f"What this cannot say: {study.limits}" * bool(study.limits),
    ):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    for line in (*tables.notes(shown), *task_tables.task_notes(study.tasks)):
        say(console, line)
    say(console, f"Report: {folder / 'report.html'}")
