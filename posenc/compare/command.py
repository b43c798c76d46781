"""`posenc compare` and `posenc report`; torch and the rest load when they run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.compare.options import Options
from posenc.report.machine.options import Figures, option


def compare(**given: Any) -> None:
    """Train each encoding short, test it long, and say which one to use.

    The same command goes on with what an interrupted one has left, and skips what is done.
    """
    from posenc.compare import study

    study.run_study(Options(**given))


compare.__signature__ = inspect.signature(Options, eval_str=True)  # type: ignore[attr-defined]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="What `posenc compare` wrote, finished or not; several of one recipe, from any "
            "machines, become one page."
        ),
    ],
    out: Annotated[
        Path | None,
        option(
            "Folder for the report of several runs.  ",
            shown="a folder below runs/ that the trials name",
        ),
    ] = None,
    published: Annotated[
        bool,
        option("Say how far the order agrees with published tables, and how sure.", "--published"),
    ] = False,
    figures: Figures = None,
) -> None:
    """Write report.html and results.csv again from the trials of runs, and print the tables."""
    from posenc.compare.reports import report_runs

    report_runs.report_runs(runs, out, published, figures)


def leaderboard(
    mine: Annotated[
        list[Path] | None,
        option(
            "A run of `posenc compare --suite` to put beside the published trials, where its "
            "recipe is theirs; may be repeated."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("Folder for the page.  ", shown="a folder below runs/ that the trials name"),
    ] = None,
    figures: Figures = None,
) -> None:
    """Show the published leaderboard: which encoding for what, and how sure."""
    from posenc.compare.reports import report_runs

    report_runs.show_leaderboard(mine or [], out, figures)
