"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Column, Table


def stdout(width: int) -> Console:
    """Standard output, `width` columns wide where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_table(
    console: Console,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    overflow: OverflowMethod = "ellipsis",
    **options: Any,
) -> None:
    """Print rows of text below a header. `overflow`: what becomes of a word wider than its column;
    `options` are rich's for a table."""
    table = Table(*(Column(escape(name), overflow=overflow) for name in header), **options)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
