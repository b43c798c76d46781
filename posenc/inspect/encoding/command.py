"""Measure what was asked for, print it, and write the page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from posenc.encoding.shape import ModelShape
from posenc.inspect.encoding.sheet import SpecSheet, measure
from posenc.inspect.encoding.words import LEGEND, table
from posenc.registry import entry
from posenc.report.console import print_table, stdout
from posenc.report.progress import tell


def run(
    names: Sequence[str], shape: ModelShape, compare: bool, as_json: bool, out: Path | None
) -> None:
    """Print the spec sheets and write the page."""
    for name in names:
        entry(name)  # unknown names fail before anything is measured
    sheets = []
    for number, name in enumerate(dict.fromkeys(names), 1):
        count = f"{number} of {len(set(names))}"
        sheets.append(measure(name, shape, lambda s, n=name, c=count: tell(f"{n} ({c}): {s}")))
    tell("")
    if as_json:
        print(json.dumps([sheet.to_json() for sheet in sheets], indent=1, allow_nan=False))
    else:
        for group in [sheets] if compare else [[sheet] for sheet in sheets]:
            _print(group)
    path = out or (None if as_json else Path("runs/inspect.html"))
    if path is not None:
        from posenc.inspect.encoding.page import write_page

        write_page(sheets, path, compare, shlex.join(["posenc", *sys.argv[1:]]))
        sys.stderr.write(f"{path}\n")


def _print(sheets: list[SpecSheet]) -> None:
    console = stdout(60 + 50 * len(sheets))
    print_table(console, ["", *(sheet.name for sheet in sheets)], table(sheets))
    console.print(LEGEND, style="dim")
