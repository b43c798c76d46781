"""Print tables on standard output."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from posenc.report.page.visible import visible


class Terminal(Console):
    """A console that shows hidden characters as escapes, also in tables, and :bug: as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def stdout(width: int) -> Console:
    """Return standard output, `width` columns wide if it is no terminal and COLUMNS is not set."""
    console = Terminal()
    return console if console.is_terminal or "COLUMNS" in os.environ else Terminal(width=width)


def stderr() -> Console:
    """Return standard error."""
    return Terminal(stderr=True)


def text_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    overflow: OverflowMethod = "ellipsis",
    named: str | None = None,
    whole: bool = False,
    **options: Any,
) -> Table:
    """Return a table of text for the terminal; `options` are passed to rich's Table.

    overflow: rich's treatment of words wider than their column. named: the column with the names of
    the rows, which are never cut; the other columns are numbers, which align right. whole: no cell
    is broken into lines.
    """
    table = Table(**options)
    for name in header:
        side = "left" if named in (None, name) else "right"
        table.add_column(
            escape(name), overflow=overflow, justify=side, no_wrap=whole or name == named
        )
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_table(console: Console, *given: Any, **options: Any) -> None:
    """Print a `text_table`."""
    console.print(text_table(*given, **options))
