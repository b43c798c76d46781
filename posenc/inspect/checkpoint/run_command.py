"""Run `posenc inspect model`: measure, judge, print the report, write the page."""

import importlib
from pathlib import Path

from posenc.command_line.progress import replace_status_line
from posenc.files.atomic import prepare_page_and_figures
from posenc.inspect.checkpoint.judgement import judge
from posenc.inspect.checkpoint.measurements import Request, measure_checkpoint
from posenc.inspect.checkpoint.report import report_of
from posenc.lazy import require_package
from posenc.report.terminal import print_report


def inspect_checkpoint(
    request: Request, as_json: bool, out: Path | None, command: str, figures: Path | None = None
) -> None:
    """Print the report of the checkpoint, write its page to `out`, and its figures into `figures`.

    as_json: print JSON instead, and write a page only where `out` names one. command: to repeat it.
    """
    path = out or (None if as_json else Path("runs/inspect.html"))
    has_figures = path is not None or figures is not None
    importlib.import_module("transformers")  # if it is missing, no folder is made
    if has_figures:
        require_package("matplotlib", "the page")
    prepare_page_and_figures(figures, path)
    judgement = judge(measure_checkpoint(request, replace_status_line))
    replace_status_line("")
    report = report_of(judgement, command, request.layers, has_figures=has_figures)
    print_report(report, as_json)
    if has_figures:
        from posenc.report.figure_files import write_and_announce
        from posenc.report.html_page import page_of

        write_and_announce(page_of(report), path, figures)
