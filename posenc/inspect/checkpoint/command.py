"""`posenc inspect ./model`: measure, print, write the page."""

import importlib
import json
from pathlib import Path

from rich.markup import escape

from posenc.inspect.checkpoint import words as rows
from posenc.inspect.checkpoint.answer import answer, extend_command, who_saw_whom
from posenc.inspect.checkpoint.sheet import Request, Sheet, measure_checkpoint
from posenc.lazy import require_package
from posenc.report.files.atomic import check_outputs
from posenc.report.page.console import print_table, stdout
from posenc.report.page.progress import tell
from posenc.report.page.visible import visible


def inspect_checkpoint(
    request: Request, as_json: bool, out: Path | None, command: str, figures: Path | None = None
) -> None:
    """Measure the checkpoint, print the answer and the measurements, write the page to `out`, and
    its figures into `figures`.

    as_json: print JSON instead, and write a page only where `out` names one. command: to repeat it.
    """
    path = out or (None if as_json else Path("runs/inspect.html"))
    importlib.import_module("transformers")  # if it is missing, no folder is made
    if path or figures:
        require_package("matplotlib", "the page")
    check_outputs(figures, path)
    sheet = measure_checkpoint(request, tell)
    tell("")
    if as_json:
        text = json.dumps(sheet.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        print(visible(text))
    else:
        _print_sheet(sheet)
    if path is None and figures is None:
        return
    from posenc.inspect.checkpoint.page import make_page
    from posenc.report.page.figure_files import write_and_say

    tell("drawing")
    page = make_page(sheet, request.layers, command)
    tell("")
    write_and_say(page, path, figures)


def _print_sheet(sheet: Sheet) -> None:
    """Print the answer first, then tables of structure, positions, attention and the exchange."""
    console = stdout(140)  # columns, where no terminal says how many it has
    console.print(answer(sheet.positions, sheet.longest), markup=False, highlight=False)
    if sheet.swap:
        console.print(who_saw_whom(sheet.swap), markup=False, highlight=False)
    line = extend_command(sheet.folder, sheet.positions, sheet.structure, sheet.longest)
    if line is not None:
        console.print(f"To try twice the length: {line}", markup=False, highlight=False)
    facts = [*rows.structure_lines(sheet).items(), *rows.positions_lines(sheet.positions).items()]
    print_table(console, ("", str(sheet.folder)), facts)
    if sheet.reason:
        console.print(sheet.reason, markup=False)
    console.print(
        f"{len(sheet.sentence)} tokens: {' | '.join(sheet.sentence.labels)}", markup=False
    )
    tables = [("Mean distance of attention, tokens", *rows.distances_lines(sheet))]
    if sheet.swap:
        words = " and ".join(sheet.swap.words)
        tables.append((f"{words} exchanged: relative change", *rows.exchange_lines(sheet.swap)))
    for title, header, lines in tables:
        print_table(console, header, lines, title=escape(title))
    for verdict in sheet.swap.verdicts if sheet.swap else ():
        console.print(verdict, markup=False)
