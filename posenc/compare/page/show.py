"""What a reader gets of a study: the page, rows for a spreadsheet, tables on the terminal."""

from pathlib import Path

from rich.console import Console

from posenc.compare.page import tables, task_tables
from posenc.compare.page.as_json import answer_json
from posenc.compare.results import Study, with_labels
from posenc.report.files.atomic import write_atomically
from posenc.report.page.console import stdout
from posenc.report.page.progress import say
from posenc.report.page.visible import visible
from posenc.tasks.known import TEXT


def write_page(study: Study, folder: Path) -> None:
    """Write report.html and results.csv of a study into the folder."""
    from posenc.compare.page.page import make_page

    labelled_study = with_labels(study)
    write_atomically(folder / "results.csv", tables.csv_text(labelled_study))
    make_page(labelled_study).write(folder / "report.html")


def write_figures_of(study: Study, figures: Path | None) -> list[str]:
    """Write the figures where they were asked for; return notes."""
    if figures is None:
        return []
    from posenc.compare.page.page import make_page
    from posenc.report.page.figure_files import write_figures

    notes = write_figures(make_page(with_labels(study)).plots(), figures)
    return [*notes, f"Figures: {figures}"]


def show_study(study: Study, folder: Path, console: Console, as_json: bool = False) -> None:
    """Print the tables, the two lines and the path of the page, or print the answer as JSON."""
    if as_json:
        print(visible(answer_json(with_labels(study), folder)))
        return
    out = stdout(160)
    labelled_study = with_labels(study)
    if study.corpus is not None:
        out.print(tables.summary_table(labelled_study.of_task(TEXT)))
    for table in (*task_tables.task_tables(study.tasks), *tables.rate_tables(labelled_study)):
        out.print(table)
    cannot = f"What this cannot say: {labelled_study.limits}"
    for line in (labelled_study.recommendation, cannot if labelled_study.limits else ""):
        say(out, line)
    for line in (*tables.study_notes(labelled_study), *task_tables.task_notes(study.tasks)):
        say(console, line)
    say(console, f"Report: {folder / 'report.html'}")
