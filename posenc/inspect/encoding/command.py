"""Measure what was asked for, print it, and write the page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posenc.encoding.shape import ModelShape
from posenc.inspect.encoding.sheet import SpecSheet, measure
from posenc.inspect.encoding.words import LEGEND, rows
from posenc.registry import entry
from posenc.report.progress import tell


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    names: Sequence[str]
    head_dim: int
    num_heads: int
    train_length: int
    compare: bool
    as_json: bool
    out: Path | None

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            self.head_dim * self.num_heads,
            self.num_heads,
            head_dim=self.head_dim,
            train_length=self.train_length,
        )


def run(request: Request) -> None:
    """Print the spec sheets and write the page."""
    for name in request.names:
        entry(name)  # unknown names fail before anything is measured
    sheets = []
    for number, name in enumerate(dict.fromkeys(request.names), 1):
        count = f"{number} of {len(set(request.names))}"
        sheets.append(
            measure(name, request.shape, lambda step, n=name, c=count: tell(f"{n} ({c}): {step}"))
        )
    tell("")
    if request.as_json:
        print(json.dumps([sheet.to_json() for sheet in sheets], indent=1, allow_nan=False))
    elif request.compare:
        _print(sheets)
    else:
        for sheet in sheets:
            _print([sheet])
    path = request.out or (None if request.as_json else Path("runs/inspect.html"))
    if path is not None:
        from posenc.inspect.encoding.page import write_page

        write_page(sheets, path, request.compare, shlex.join(["posenc", *sys.argv[1:]]))
        sys.stderr.write(f"{path}\n")


def _print(sheets: list[SpecSheet]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", *(escape(sheet.name) for sheet in sheets))
    lines = [rows(sheet) for sheet in sheets]
    for label in dict.fromkeys(label for each in lines for label in each):
        table.add_row(label, *(escape(each.get(label, "–")) for each in lines))
    console = Console()
    if not console.is_terminal:
        console = Console(width=60 + 50 * len(sheets))
    console.print(table)
    console.print(LEGEND, style="dim")
