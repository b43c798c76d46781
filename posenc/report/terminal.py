"""Print reports and tables on standard output."""

import io
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, OverflowMethod
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from posenc.report.escaping import show_hidden_characters
from posenc.report.report import (
    LONG_TEXT_LENGTH,
    Block,
    Cell,
    Code,
    Facts,
    Heading,
    Items,
    Labelled,
    Report,
    Section,
    Table,
    Value,
    as_json,
    cell_text,
    is_on_next_steps,
    numeric_columns,
)

FRAME_WIDTH = 3
"""Characters that the frame of a table takes for each column."""
WIDTH_WITHOUT_TERMINAL = 140
"""Columns of a report on a standard output that is no terminal and does not say its own."""
MIN_SENTENCE_WIDTH = 30
"""Columns that a sentence beside a label gets on a narrow console."""
LABELLED_WIDTH = 100
"""Columns after which sentences beside a label are wrapped: chosen."""


class Terminal(Console):
    """A console of rich that shows hidden characters as escapes, also in tables, and emoji codes
    such as :bug: as text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(show_hidden_characters(text), **options)


def stdout_console(width: int) -> Console:
    """Return a console on standard output, `width` columns wide if it is no terminal and COLUMNS is
    not set."""
    console = Terminal()
    return console if console.is_terminal or "COLUMNS" in os.environ else Terminal(width=width)


def stderr_console() -> Console:
    """Return a console on standard error."""
    return Terminal(stderr=True)


def print_line(console: Console, text: str) -> None:
    """Print a text on one line, without markup and without wrapping."""
    console.print(" ".join(text.splitlines()), markup=False, highlight=False, soft_wrap=True)


def rich_table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    overflow: OverflowMethod = "ellipsis",
    name_column: str | None = None,
    wraps_nothing: bool = False,
    **options: Any,
) -> RichTable:
    """Return rich's table with these texts, for the terminal.

    header: headings of the columns. rows: the texts of the cells, row by row; rich's markup in them
        is shown, not applied.
    overflow: what rich does with a word that is wider than its column: "ellipsis" cuts it.
    name_column: heading of the column that names the rows. It is never broken into lines, and the
        other columns are aligned right, as numbers. None: all columns are aligned left.
    wraps_nothing: no cell is broken into lines.
    options: further arguments of rich's Table, such as title.
    """
    table = RichTable(**options)
    for heading in header:
        alignment = "left" if name_column in (None, heading) else "right"
        keeps_line = wraps_nothing or heading == name_column
        table.add_column(escape(heading), overflow=overflow, justify=alignment, no_wrap=keeps_line)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def print_report(report: Report, in_json: bool) -> None:
    """Print a report on standard output: as text, or as JSON if `in_json`. With JSON the cautions
    are printed on standard error, too."""
    if not in_json:
        show(report, stdout_console(WIDTH_WITHOUT_TERMINAL))
        return
    print(as_json(report))
    for caution in report.cautions:
        print_line(stderr_console(), caution)


def as_text(report: Report, width: int = WIDTH_WITHOUT_TERMINAL) -> str:
    """Return a report as text of `width` columns, as the terminal shows it."""
    buffer = io.StringIO()
    show(report, Terminal(file=buffer, width=width, force_terminal=False))
    return buffer.getvalue().rstrip("\n")


def show(report: Report, console: Console) -> None:
    """Print a report: its headline, what it cannot say, the sections that are no detail, its
    cautions, and last what to do next. Figures, links and folds are left out."""
    if report.headline:
        print_line(console, report.headline)
    if report.limits:
        print_line(console, f"What this cannot say: {report.limits}")
    next_steps = [section for section in report.sections if is_on_next_steps(section)]
    for section in report.sections:
        if not section.is_detail and not is_on_next_steps(section):
            show_section(section, console)
    for caution in report.cautions:
        print_line(console, caution)
    for section in next_steps:
        show_section(section, console)


def show_section(section: Section, console: Console) -> None:
    """Print the blocks of a section."""
    for block in section.blocks:
        _show_block(block, console)


def _show_block(block: Block, console: Console) -> None:
    """Print a block as text. A Plot, Links, Fold, Headline, Caution or Limits prints nothing."""
    match block:
        case Table():
            _show_table(block, console)
        case Facts(items):
            _print_lines(console, (f"{name}: {value}" for name, value in items.items()))
        case Items(texts):
            _print_lines(console, texts)
        case Labelled():
            _print_lines(console, _labelled_lines(block, min(console.width, LABELLED_WIDTH)))
        case Code(text):
            _print_lines(console, (f"  {line}" for line in text.splitlines()))
        case str():
            print_line(console, block)


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print each text on a line of its own."""
    for line in lines:
        print_line(console, line)


def _show_table(table: Table, console: Console) -> None:
    """Print a table below its caption, in parts where it is wider than the console, and then its
    notes."""
    if table.caption:
        print_line(console, table.caption)
    for part in split_to_width(table, console.width):
        console.print(part)
    for number, note in enumerate(_notes(table), 1):
        print_line(console, f"[{number}] {note}")


def _labelled_lines(block: Labelled, width: int) -> Iterator[str]:
    """Yield an empty line, and then the lines of a label with its sentences, wrapped between words
    at `width` columns, and its commands, a line each, beside it."""
    prefix = f"{block.label}  "
    indent = " " * cell_len(prefix)
    yield ""
    for part in block.parts:
        if isinstance(part, Code):
            lines = [f"    {line}" for line in part.text.splitlines()]
        else:
            sentence_width = max(width - len(indent), MIN_SENTENCE_WIDTH)
            lines = textwrap.wrap(
                part, sentence_width, break_long_words=False, break_on_hyphens=False
            )
        for line in lines:
            yield prefix + line
            prefix = indent


def split_to_width(table: Table, width: int) -> Iterator[RichTable]:
    """Yield the table for a console of `width` columns: as many tables as its columns need, each
    with the names of the rows. No number is broken or cut; long texts are broken between words."""
    columns = _columns(table)
    other_columns = columns[1:]
    while other_columns:
        count = _count_fitting_columns(columns[0], other_columns, width)
        yield _table_of_columns(columns[0], other_columns[:count])
        other_columns = other_columns[count:]


class _Column(NamedTuple):
    """A column as the terminal shows it.

    width: the least that it needs with its frame, in characters. is_whole: True if no cell may be
    broken into lines.
    """

    heading: str
    cells: list[str]
    is_numeric: bool
    is_whole: bool
    width: int


def _columns(table: Table) -> list[_Column]:
    """Return the columns of a table, with the widths that they need in the terminal."""
    notes = _notes(table)
    columns = []
    for i, is_numeric in enumerate(numeric_columns(table)):
        column_heading = table.header[i]
        heading = column_heading.text if isinstance(column_heading, Heading) else column_heading
        cells = [_noted_cell_text(row[i], notes) for row in table.rows]
        if is_numeric:
            heading = _break_heading(heading, max(map(cell_len, cells)))
        texts = [show_hidden_characters(text) for text in (*heading.split("\n"), *cells)]
        longest_width = max(map(cell_len, texts))
        least_width = (
            longest_width if is_numeric else min(longest_width, max(map(_wrapped_width, texts)))
        )
        columns.append(
            _Column(
                heading, cells, is_numeric, least_width == longest_width, least_width + FRAME_WIDTH
            )
        )
    return columns


def _wrapped_width(text: str) -> int:
    """Return the least width in characters at which a text is wrapped into lines: that of its
    longest word, but at least LONG_TEXT_LENGTH."""
    return max([LONG_TEXT_LENGTH, *map(cell_len, text.split())])


def _break_heading(heading: str, width: int) -> str:
    """Return the heading in lines of at most `width` columns, or of one word: it is broken at
    spaces and after underscores."""
    lines: list[str] = []
    for word in re.findall(r"[^ _]+_?|_", heading):
        space = "" if not lines or lines[-1].endswith("_") else " "
        if lines and cell_len(lines[-1] + space + word) <= width:
            lines[-1] += space + word
        else:
            lines.append(word)
    return "\n".join(lines)


def _count_fitting_columns(first: _Column, rest: Sequence[_Column], width: int) -> int:
    """Return how many columns of `rest`, at least one, fit beside the first one."""
    count = len(rest)
    while count > 1 and first.width + sum(column.width for column in rest[:count]) + 1 > width:
        count -= 1
    return count


def _table_of_columns(first: _Column, others: Sequence[_Column]) -> RichTable:
    """Return columns as a table; numbers and short texts are not broken into lines."""
    table = RichTable()
    columns = [first, *others]
    for column in columns:
        alignment = "right" if column.is_numeric else "left"
        heading = escape(column.heading)
        table.add_column(heading, justify=alignment, no_wrap=column.is_whole, overflow="fold")
    for cells_of_row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*map(escape, cells_of_row))
    return table


def _notes(table: Table) -> list[str]:
    """Return the notes of a table's cells, each once, in the order of their numbers."""
    cells = (cell for row in table.rows for cell in row if isinstance(cell, Cell))
    return [*dict.fromkeys(cell.note for cell in cells if cell.note)]


def _noted_cell_text(value: Value, notes: Sequence[str]) -> str:
    """Return the text of a cell, with the number of its note if it has one."""
    note = isinstance(value, Cell) and value.note
    return f"{cell_text(value)} [{notes.index(note) + 1}]" if note else cell_text(value)
