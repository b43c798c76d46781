"""`posenc inspect ./model`: measure, print, write the page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.markup import escape

from posenc.inspect.checkpoint import words as rows
from posenc.inspect.checkpoint.sheet import Request, Sheet, measure_checkpoint
from posenc.report.console import print_table, stdout
from posenc.report.progress import tell


def inspect_checkpoint(request: Request, as_json: bool, out: Path | None, command: str) -> None:
    """Print what was measured, and write the page."""
    sheet = measure_checkpoint(request, tell)
    tell("")
    if as_json:
        print(json.dumps(sheet.to_json(), indent=1, ensure_ascii=False))
    else:
        _print(sheet)
    path = out or (None if as_json else Path("runs/inspect.html"))
    if path is not None:
        from posenc.inspect.checkpoint.page import write_checkpoint_page

        tell("drawing")
        write_checkpoint_page(sheet, path, request.layers, command)
        tell("")
        sys.stderr.write(f"{path}\n")


def _print(sheet: Sheet) -> None:
    console = stdout(140)
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
    for said in sheet.swap.verdicts if sheet.swap else ():
        console.print(said, markup=False)
