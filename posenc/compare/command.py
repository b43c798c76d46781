"""`posenc compare`, `report`, `judge` and `leaderboard`. torch is imported when they run."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.command_line.options import Figures, Json, Tables, option
from posenc.compare.options import Options


def compare(**options: Any) -> None:
    """Train each encoding short, test it long, and recommend one.

    The same command resumes an interrupted one and skips finished trials.
    """
    from posenc.command_line.progress import status_line_while_loading

    with status_line_while_loading(
        "trains short, tests long; reads the text first, then says how long it takes"
    ):
        from posenc.compare import run_sizes
    run_sizes.run(Options(**options))


# typer makes the command's options from the signature.
compare.__signature__ = inspect.signature(Options, eval_str=True)  # type: ignore[attr-defined]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders written by `posenc compare`, finished or not. Several of one recipe, "
            "from any machines, become one page; of two of different recipes it has the "
            "differences."
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
    tables: Tables = None,
    as_json: Json = False,
) -> None:
    """Write report.html and results.csv again from the trials of runs, and print the tables."""
    from posenc.compare.reports import report_runs

    report_runs.report_runs(runs, out, figures, as_json, tables)


def judge(
    table: Annotated[
        Path,
        typer.Argument(
            help="A CSV file of losses from any trainer, with the columns encoding, seed, length "
            "and loss. See docs/judge.md."
        ),
    ],
    columns: Annotated[
        str | None,
        option(
            "The table's own names of columns: encoding=pe,loss=val_loss. A loss is in nats per "
            "token unless its column is bits, or bits_per_byte.",
            shown=False,
            panel="Data",
        ),
    ] = None,
    trained_length: Annotated[
        int | None,
        option(
            "Length of the windows of training.",
            shown="the shortest length of the table",
            min=1,
            panel="Data",
        ),
    ] = None,
    task: Annotated[
        str | None,
        option("Which task to judge, if the table has several.", shown=False, panel="Data"),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "Folder for report.html and results.csv.  ",
            shown="a folder below runs/ named by the table",
            panel="Output",
        ),
    ] = None,
    figures: Figures = None,
    tables: Tables = None,
    as_json: Json = False,
) -> None:
    """Judge losses from any trainer: the answer, tables and page of compare."""
    from posenc.compare.reports import judge_losses

    judge_losses.judge_file(table, columns, trained_length, task, out, figures, as_json, tables)


def leaderboard(as_json: Json = False) -> None:
    """Print the published leaderboard: the best encodings for each task, with significance."""
    from posenc.compare.reports.leaderboard import show_published

    show_published(as_json)
