"""`posenc report` and `posenc leaderboard`. torch is imported when they run."""

from pathlib import Path
from typing import Annotated

import typer

from posenc.command_line.options import Figures, Json, option


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders written by `posenc compare`, finished or not. Several of one recipe, "
            "from any machines, become one page."
        ),
    ],
    out: Annotated[
        Path | None,
        option(
            "Folder for the report of several runs.  ",
            shown="a folder below runs/ named by the trials",
            panel="Output",
        ),
    ] = None,
    figures: Figures = None,
    as_json: Json = False,
) -> None:
    """Write report.html and results.csv again from the trials of runs, and print the tables."""
    from posenc.compare.reports import report_runs

    report_runs.report_runs(runs, out, figures, as_json)


def leaderboard(as_json: Json = False) -> None:
    """Print the published leaderboard: the best encodings for each task, with significance."""
    from posenc.compare.reports.leaderboard import show_published

    show_published(as_json)
