"""Print tables on standard output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Column, Table


def stdout(width: int) -> Console:
    """Return standard output, `width` columns wide if it is no terminal."""
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
    """Print rows of text below a header. `overflow` is rich's treatment of words wider than their
    column; `options` are passed to rich's Table."""
    table = Table(*(Column(escape(name), overflow=overflow) for name in header), **options)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
