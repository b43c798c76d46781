"""What a command returns, for every renderer: the terminal, a page, JSON and CSV.

report = Report("Which encoding?", "Use alibi.", {"first": "alibi"}, [Section("Loss", [table])])
page_of(report).write("report.html")     # posenc.report.html_page
show(report, console)                    # posenc.report.terminal
print(as_json(report))
"""

import csv
import dataclasses
import io
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posenc.report.escaping import show_hidden_characters

if TYPE_CHECKING:
    from posenc.report.chart import Chart


SCHEMA = 1
"""Version of what `--json` prints, its key "schema": one more whenever a key goes or changes its
meaning. A new key changes nothing."""
LONG_TEXT_LENGTH = 24
"""A cell with more letters gets a wider column on the page, so that it is not tall and narrow."""


@dataclass(frozen=True)
class Number:
    """Hold a measured number and the ends of its interval, which are None if there is none.

    format_spec: the format in which all three are written, such as ".2f".
    unit: text directly after the number, such as " %", or a verdict.
    """

    value: float
    low: float | None = None
    high: float | None = None
    format_spec: str = ".4g"
    unit: str = ""

    def __str__(self) -> str:
        value_in_words = f"{self.value:{self.format_spec}}{self.unit}"
        if self.low is None or self.high is None:
            return value_in_words
        separator = " to " if self.format_spec.startswith("+") else "–"
        low_in_words = f"{self.low:{self.format_spec}}"
        high_in_words = f"{self.high:{self.format_spec}}"
        return f"{value_in_words} ({low_in_words}{separator}{high_in_words})"


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

    A table wider than the page scrolls sideways, and its first column stays. With `as_cards` a
    narrow screen shows each row as a card instead. name: of its CSV file, and in JSON.
    """

    header: Sequence[str | Heading]
    rows: Sequence[Sequence[Value]]
    caption: str = ""
    as_cards: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(
                    f"Table: every row needs {len(self.header)} cells like the header, "
                    f"got {len(row)} in {list(row)!r}."
                )


@dataclass(frozen=True)
class Plot:
    """Show a chart, its caption, and a text alternative for readers who cannot see it.

    caption: describes what is drawn. description: if it is empty, the first and the last point of
    each curve.
    name: name of its files, see posenc.report.figure_files. wide: use the whole width, and
    scroll sideways on a narrow screen instead of shrinking.
    """

    chart: "Chart"
    caption: str
    description: str = ""
    name: str = ""
    wide: bool = False


@dataclass(frozen=True)
class TextBlock:
    """A block of one text; its subclass says how it is shown."""

    text: str


class Code(TextBlock):
    """Show commands or code; one click selects it."""


class Headline(TextBlock):
    """Show the answer, in large letters."""


class Limits(TextBlock):
    """Show what the answer does not say."""


class Caution(TextBlock):
    """Show a warning that the reader must see before trusting the rest."""


@dataclass(frozen=True)
class Facts:
    """Show names and their values, one pair a line. Values are shown as `str` writes them."""

    items: Mapping[str, object]


@dataclass(frozen=True)
class Items:
    """Show sentences as a list, with a bullet for each."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Links:
    """Show a line of links; the terminal leaves it out.

    items: address of each link by the text that is shown of it.
    """

    items: Mapping[str, str]


@dataclass(frozen=True)
class Labelled:
    """Show sentences and commands beside a label, such as a finding beside the code of its rule.

    parts: texts are sentences, Code is commands.
    """

    label: str
    parts: Sequence[str | Code]


@dataclass(frozen=True)
class Fold:
    """Hide details until a click opens them; without figures, which a closed fold cannot size."""

    summary: str
    blocks: "Sequence[Block]"


Block = (
    str
    | Table
    | Plot
    | Code
    | Facts
    | Items
    | Labelled
    | Headline
    | Caution
    | Limits
    | Links
    | Fold
)
"""A plain string is a paragraph."""


@dataclass(frozen=True)
class Section:
    """Hold blocks below a heading. is_detail: shown only on the page, where there is room."""

    heading: str
    blocks: Sequence[Block]
    is_detail: bool = False


@dataclass(frozen=True)
class Report:
    """Hold the answer of a command, and what it rests on.

    title, subtitle: of the page.
    headline: the answer. limits: what it does not say. cautions: what the reader must know before
    trusting it.
    facts: what programs read, by name: numbers, words, lists, mappings and dataclasses of them.
    """

    title: str
    headline: str
    facts: Mapping[str, Any]
    sections: Sequence[Section]
    subtitle: str = ""
    limits: str = ""
    cautions: Sequence[str] = ()

    def tables(self) -> dict[str, Table]:
        """Return the tables that have a name, by name."""
        return named_tables(block for section in self.sections for block in section.blocks)


def section_of_next_steps(steps: Sequence[str | Code]) -> Section:
    """Return the section with which a report ends: what the user may do next, in sentences and
    commands."""
    return Section("", [Labelled("next", steps)])


def section_on_training(names: Sequence[str]) -> Section:
    """Return the section with the command that trains the encodings `names` and compares them, with
    a baseline if there is only one."""
    compared = list(names)
    if len(compared) == 1:
        baselines = ("rope", "alibi")
        compared += [name for name in baselines if name not in compared][:1]
    command = shlex.join(["posenc", "compare", *compared])
    return section_of_next_steps(["Train on short text, test on long text:", Code(command)])


def is_on_next_steps(section: Section) -> bool:
    """Return True for a section that `section_of_next_steps` made."""
    return any(isinstance(block, Labelled) and block.label == "next" for block in section.blocks)


def cell_text(value: Value) -> str:
    """Return a value as the terminal and the page show it: None -> "–", 1200 -> "1,200"."""
    if value is None:
        return "–"
    if isinstance(value, Cell):
        return str(value.text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


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
    is_explained_gap = isinstance(value, Cell) and (bool(value.note) or value.text == "–")
    return value is None or value == "" or _is_number(value) or is_explained_gap


def named_tables(blocks: Iterable[Block]) -> dict[str, Table]:
    """Return the tables that have a name, by name, among blocks and in folds."""
    tables: dict[str, Table] = {}
    for block in blocks:
        if isinstance(block, Fold):
            tables |= named_tables(block.blocks)
        elif isinstance(block, Table) and block.name:
            tables[block.name] = block
    return tables


def as_json(report: Report) -> str:
    """Return the facts as JSON, and with them "schema", the number SCHEMA, and "tables": each named
    table as a list of rows.

    A number that is not finite is null, for which JSON has no other word.
    """
    tables = {name: records_of(table) for name, table in report.tables().items()}
    content = json_value({"schema": SCHEMA, **report.facts, "tables": tables})
    return show_hidden_characters(
        json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)
    )


def json_value(value: Any) -> Any:
    """Return a value that JSON can hold: dataclasses become mappings, tuples lists, and numbers
    that are not finite None."""
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: json_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def records_of(table: Table) -> list[dict[str, Any]]:
    """Return each row of a table by column: numbers as they were measured, not as they are shown.

    An interval has columns of its own, "NAME, low" and "NAME, high", in every row of its column.
    """
    if not table.rows:
        return []
    columns: dict[str, list[Any]] = {}
    for heading, cells in zip(table.header, zip(*table.rows, strict=True), strict=True):
        name = heading.text if isinstance(heading, Heading) else heading
        columns |= _column_with_ends(name, [measured_value(cell) for cell in cells])
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _column_with_ends(name: str, measured_values: Sequence[Any]) -> dict[str, list[Any]]:
    """Return a column by its name; if it has intervals, also the columns "NAME, low" and "NAME,
    high" with their ends."""
    numbers = [value for value in measured_values if isinstance(value, Number)]
    values = [value.value if isinstance(value, Number) else value for value in measured_values]
    columns = {name or "name": values}
    if any(number.low is not None for number in numbers):
        for end in ("low", "high"):
            columns[f"{name}, {end}"] = [getattr(value, end, None) for value in measured_values]
    return columns


def measured_value(cell: Value) -> Any:
    """Return what a cell shows: a Number, a number, a text, or None where nothing was measured."""
    return measured_value(cell.text) if isinstance(cell, Cell) else cell


def table_csv(table: Table) -> str:
    """Return a table as CSV. Numbers have all their digits; what is unknown is empty."""
    records = json_value(records_of(table))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for row in ([*records[0]] if records else [], *(row.values() for row in records)):
        writer.writerow(
            show_hidden_characters(value) if isinstance(value, str) else value for value in row
        )
    return buffer.getvalue()


def join_names(names: Iterable[str]) -> str:
    """Return names in words, by commas and the last by "and"; "none" where there are none.

    >>> join_names(["rope", "alibi", "t5"])
    'rope, alibi and t5'
    """
    *all_but_last, last = [*names] or ["none"]
    return f"{', '.join(all_but_last)} and {last}" if all_but_last else last


def list_up_to_six(names: Iterable[str]) -> str:
    """Return up to six names as a list in words; of more names the first five and the number of
    others."""
    unique = list(dict.fromkeys(names))
    others = [f"{len(unique) - 5} others"] if len(unique) > 6 else []
    return join_names([*unique[:5], *others] if others else unique) if unique else ""


_NUMBER_WORDS = "no one two three four five six seven eight nine ten".split()


def number_word(number: int) -> str:
    """Return a number up to ten as a word, "two", and a larger one in digits."""
    return _NUMBER_WORDS[number] if number < len(_NUMBER_WORDS) else str(number)
