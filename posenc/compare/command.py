"""`posenc compare` and `posenc report`; torch and the rest load when they run."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from posenc.compare.options import Options
from posenc.report.options import Figures


def compare(**given: Any) -> None:
    """Train each encoding short, test it long, and say which one to use.

    The same command goes on with what an interrupted one has left, and skips what is done.
    """
    from posenc.compare import study

    study.run_study(Options(**given))


compare.__signature__ = inspect.signature(Options, eval_str=True)  # type: ignore[attr-defined]


def report(
    folder: Annotated[Path, typer.Argument(help="What `posenc compare` wrote, finished or not.")],
    figures: Figures = None,
) -> None:
    """Write report.html and results.csv again from the trials in a folder, and print the table."""
    from posenc.compare import study

    study.rebuild_report(folder, figures)
