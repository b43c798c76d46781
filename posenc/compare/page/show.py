"""Write and print the report of a study."""

from pathlib import Path

from rich.console import Console

from posenc.compare.page.report import report_of
from posenc.compare.page.results_csv import csv_text
from posenc.compare.results import Study, with_labels
from posenc.files.atomic import write_atomically
from posenc.report.figure_files import write_page
from posenc.report.html_page import page_of
from posenc.report.terminal import print_line, print_report


def write_report_files(study: Study, folder: Path) -> None:
    """Write report.html and results.csv of a study into the folder."""
    write_atomically(folder / "results.csv", csv_text(with_labels(study)))
    page_of(report_of(study)).write(folder / "report.html")


def write_figures(study: Study, figures: Path | None) -> list[str]:
    """Write the figures and tables of a study where they were asked for; return notes."""
    if figures is None:
        return []
    notes = write_page(page_of(report_of(study)), None, figures)
    return [*notes, f"Figures: {figures}"]


def show_study(study: Study, folder: Path, console: Console, as_json: bool = False) -> None:
    """Print the report on stdout, and the path of the page on `console`; or print JSON."""
    print_report(report_of(study, folder), as_json)
    if not as_json:
        print_line(console, f"Report: {folder / 'report.html'}")
