"""Tables of a page, with notes that explain words."""

from collections.abc import Sequence
from dataclasses import dataclass

from posenc.report.escaping import escape_html

LONG_TEXT_LENGTH = 24
"""A cell with more letters gets more width, against tall narrow columns."""


@dataclass(frozen=True)
class Number:
    """Hold a measured number and the ends of its interval, which are None if there is none.

    form: the format in which all three are written, such as ".2f".
    unit: text directly after the number, such as " %", or a verdict.
    """

    value: float
    low: float | None = None
    high: float | None = None
    form: str = ".4g"
    unit: str = ""

    def __str__(self) -> str:
        number = f"{self.value:{self.form}}{self.unit}"
        if self.low is None or self.high is None:
            return number
        to = " to " if self.form.startswith("+") else "–"
        return f"{number} ({self.low:{self.form}}{to}{self.high:{self.form}})"


@dataclass(frozen=True)
class Cell:
    """Hold a table cell with more than its text.

    text: a text or a Number.
    note: explanation that is shown below the table; "" for none.
    strong: True for bold letters, on the page.
    second_line: small text below the first, on the page; "" for none.
    tone: background colour on the page, from 1 (strongest) to 4; 0 for none.
    """

    text: str | Number
    note: str = ""
    strong: bool = False
    second_line: str = ""
    tone: int = 0


@dataclass(frozen=True)
class Heading:
    """Hold the heading of a column, and its meaning in small letters below."""

    text: str
    meaning: str = ""


Value = str | int | float | Number | Cell | None


@dataclass(frozen=True)
class Table:
    """Hold rows under a header. Columns of numbers are aligned right; the first names the row.

    A table wider than the page scrolls sideways, and its first column stays. With `cards` a narrow
    screen shows each row as a card instead. name: of its CSV file, and in JSON.
    """

    header: Sequence[str | Heading]
    rows: Sequence[Sequence[Value]]
    caption: str = ""
    cards: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"Table: every row needs {len(self.header)} cells like the header, "
                    f"got {len(row)} in {list(row)!r}."
                )


def table_html(table: Table) -> str:
    """Return the table as HTML, its caption above it and its notes below."""
    headings = [h if isinstance(h, Heading) else Heading(h) for h in table.header]
    numeric = numeric_columns(table)
    notes: dict[str, int] = {}
    head = "".join(map(_heading_html, headings, numeric))
    labels = [""] * len(headings)
    if table.cards:
        labels = [f' data-label="{escape_html(heading.text)}"' for heading in headings]
    rows = [_row_html(row, numeric, labels, notes) for row in table.rows]
    caption = f"<p class=caption>{escape_html(table.caption)}</p>" if table.caption else ""
    name = table.caption or ", ".join(heading.text for heading in headings)
    kind = '"table cards"' if table.cards else "table"
    below = "".join(f"<li>{escape_html(note)}</li>" for note in notes)
    below = f"<ol class=notes>{below}</ol>" if below else ""
    return (
        f'{caption}<div class={kind} role=region tabindex=0 aria-label="{escape_html(name)}">'
        f"<table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>{below}"
    )


def _row_html(
    row: Sequence[Value], numeric: Sequence[bool], labels: Sequence[str], notes: dict[str, int]
) -> str:
    """Return a row as HTML, and number its notes; `labels` are attributes of its cells."""
    cells = [f"<th scope=row{_class_attribute(False, row[0])}>{_cell_html(row[0], notes)}</th>"]
    for value, is_numeric, label in zip(row[1:], numeric[1:], labels[1:], strict=True):
        cells.append(
            f"<td{_class_attribute(is_numeric, value)}{label}>{_cell_html(value, notes)}</td>"
        )
    return f"<tr>{''.join(cells)}</tr>"


def _cell_html(value: Value, notes: dict[str, int]) -> str:
    """Return a cell's content as HTML, with the number of its note, which `notes` keeps."""
    if not isinstance(value, Cell):
        return escape_html(cell_text(value))
    cell = escape_html(str(value.text))
    if value.strong:
        cell = f"<strong>{cell}</strong>"
    if value.second_line:
        cell = f"<span>{cell}<small>{escape_html(value.second_line)}</small></span>"
    if value.note:
        number = notes.setdefault(value.note, len(notes) + 1)
        cell = f"<span>{cell}<sup>{number}</sup></span>"
    return cell


def cell_text(value: Value) -> str:
    """Return a value as the terminal and the page show it: None -> "–", 1200 -> "1,200"."""
    if value is None:
        return "–"
    if isinstance(value, Cell):
        return str(value.text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _heading_html(heading: Heading, is_numeric: bool) -> str:
    """Return the heading of a column as HTML; is_numeric: of a column of numbers."""
    meaning = f"<small>{escape_html(heading.meaning)}</small>" if heading.meaning else ""
    return f"<th scope=col{_class_attribute(is_numeric)}>{escape_html(heading.text)}{meaning}</th>"


def _class_attribute(is_numeric: bool, value: Value = None) -> str:
    """Return the attribute `class` of a cell, after a space: its column has numbers, it is a long
    text, its tone. "" without any of these.

    _class_attribute(True) -> " class=number"
    """
    names = []
    if is_numeric:
        names.append("number")
    elif isinstance(value, str) and len(value) > LONG_TEXT_LENGTH:
        names.append("long")
    if isinstance(value, Cell) and value.tone:
        names.append(f"tone{value.tone}")
    quote = '"' if len(names) > 1 else ""
    return f" class={quote}{' '.join(names)}{quote}" if names else ""


def numeric_columns(table: Table) -> list[bool]:
    """Return for each column True if it has at least one number and otherwise only gaps, so that it
    is aligned right."""
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.header)
    return [any(map(_is_number, c)) and all(map(_is_number_or_gap, c)) for c in columns]


def _is_number(value: Value) -> bool:
    """Return True for a number, or a text that begins with one after a sign: "≈ 3.5 MiB"."""
    if isinstance(value, Cell):
        value = value.text
    if isinstance(value, Number):
        return True
    if isinstance(value, str):
        value = value.strip().lstrip("+-−<>≈≥≤")
        return value[:1].isdigit() and ", " not in value  # a list of numbers is a text
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number_or_gap(value: Value) -> bool:
    """Return True for a number, for None or "", and for a Cell in place of a number: "–", or any
    text with a note that says why there is no number."""
    noted = isinstance(value, Cell) and (bool(value.note) or value.text == "–")
    return value is None or value == "" or _is_number(value) or noted
