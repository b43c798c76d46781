"""Read a table of losses that any trainer wrote, and check each of its rows by itself.

A row is one loss. The columns have these names, or are renamed:

    encoding,seed,length,loss        loss: nats per token
    rope,0,128,3.21

or, with a column for each length,

    encoding,seed,128,256,512
    rope,0,3.21,3.19,3.35
"""

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

from posenc.compare.scores import READINGS
from posenc.compare.trial.config import check_encoding_name
from posenc.files.opening import read_file_text
from posenc.report.report import join_names


class LossUnit(NamedTuple):
    """Hold what the numbers of a column of losses are.

    words: "nats per token". bits: bits of one of them. per: what a loss is for, "token" or "byte".
    """

    words: str
    bits: float
    per: str


BITS_OF_A_NAT = 1 / math.log(2)
UNIT_OF_COLUMN = {
    "loss": LossUnit("nats per token", BITS_OF_A_NAT, "token"),
    "bits": LossUnit("bits per token", 1.0, "token"),
    "bits_per_token": LossUnit("bits per token", 1.0, "token"),
    "bits_per_byte": LossUnit("bits per byte", 1.0, "byte"),
}
"""Columns that hold losses, of which a table has one."""
NEEDED_COLUMNS = ("encoding", "seed", "length")
OPTIONAL_COLUMNS = ("reading", "size", "steps", "seconds", "task", "position")
COLUMNS = (*NEEDED_COLUMNS, *UNIT_OF_COLUMN, *OPTIONAL_COLUMNS)
MAX_BITS = 100.0
"""Bits above which a number is no loss: a uniform guess among a million tokens has 20. Chosen."""
MAX_TASK_LETTERS = 100
"""Letters of a task at most, so that messages stay readable: chosen."""
_WIDE_COLUMN = re.compile(rf"(?:({'|'.join(UNIT_OF_COLUMN)})[ _@])?(\d+)")
"""Name of a column with the losses at one length: `512`, or with its unit `bits_512`."""
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_NOT_FINITE = re.compile(r"[+-]?(nan|inf|infinity)", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"(\d+)(\.0*)?")
_COUNT_WITH_SUFFIX = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmb])", re.IGNORECASE)
_FACTOR_OF_SUFFIX = {"k": 1e3, "m": 1e6, "b": 1e9}


class LossRow(NamedTuple):
    """Hold one loss of a table. What the table does not have is None.

    place: where it stands, in words: "line 7".
    bits: in bits, per token or byte as the table has it; NaN or infinite for a trial that failed.
    size: number of parameters. seconds: of training.
    position: the first of the tokens that the loss is a mean of; None for the whole window.
    """

    place: str
    encoding: str
    seed: int
    length: int
    bits: float
    reading: str
    size: int | None
    steps: int | None
    seconds: float | None
    task: str
    position: int | None


class LossTable(NamedTuple):
    """Hold the rows of a table of losses.

    name: of its file, or "the table". columns: those that it has, by the names of COLUMNS.
    """

    name: str
    unit: LossUnit
    columns: frozenset[str]
    rows: tuple[LossRow, ...]


_Cells = Mapping[str, Any]
"""The cells of a row by the names of its columns, as the table spells them."""


def read_loss_table(path: Path, renamed: Mapping[str, str] | None = None) -> LossTable:
    """Read a table from a CSV file, in UTF-8.

    renamed: the table's own names of columns, by those of COLUMNS.
    Raises: ValueError for a file that is no such table, with the line where there is one.
    """
    try:
        text = read_file_text(path)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no CSV file: it is not text in UTF-8.") from None
    text = text.removeprefix("\ufeff")  # a mark that spreadsheets write before the text
    header, places_and_cells = _split_into_cells(path, text)
    return _loss_table(str(path), header, places_and_cells, renamed or {})


def loss_table_of(table: Any, renamed: Mapping[str, str] | None = None) -> LossTable:
    """Return the table of a pandas DataFrame, or of a list of dicts, one for each row.

    renamed: see `read_loss_table`. Raises: ValueError, TypeError for anything else.
    """
    named_records = []
    for record in _records_of(table):
        if not isinstance(record, Mapping):
            raise TypeError(
                "judge: expected a pandas DataFrame or a list of dicts, one for each row, got "
                f"{type(table).__name__} of {type(record).__name__}."
            )
        named_records.append({str(name): cell for name, cell in record.items()})
    header = list(dict.fromkeys(name for record in named_records for name in record))
    places_and_cells = [(f"row {i}", record) for i, record in enumerate(named_records)]
    return _loss_table("the table", header, places_and_cells, renamed or {})


def _records_of(table: Any) -> Iterable[Any]:
    """Return the rows of a DataFrame as dicts, and of a list what is in it."""
    if hasattr(table, "to_dict") and hasattr(table, "columns"):
        return table.to_dict("records")
    if isinstance(table, Iterable) and not isinstance(table, bytes | Mapping):
        return table
    raise TypeError(
        f"judge: expected a pandas DataFrame or a list of dicts, got {type(table).__name__}."
    )


def parse_renamed_columns(text: str) -> dict[str, str]:
    """Return the table's own names of columns by those of COLUMNS, from the text of --columns.

    >>> parse_renamed_columns("encoding=pe,loss=val_loss")
    {'encoding': 'pe', 'loss': 'val_loss'}
    """
    renamed: dict[str, str] = {}
    for pair in text.split(","):
        name, equals, own_name = (part.strip() for part in pair.partition("="))
        if not (name and equals and own_name) or name in renamed:
            raise ValueError(
                f"--columns must be pairs such as encoding=pe,loss=val_loss, got {text!r}."
            )
        renamed[name] = own_name
    return renamed


def _split_into_cells(path: Path, text: str) -> tuple[list[str], list[tuple[str, _Cells]]]:
    """Return the header of a CSV text, and of each further line its place in words and its
    cells."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, cells) for cells in reader if any(map(str.strip, cells))]
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}, is no CSV: {error}.") from None
    if not lines:
        raise ValueError(f"{path} is empty: expected a line with the names of columns, then rows.")
    header = [name.strip() for name in lines[0][1]]
    if len(header) == 1:
        _refuse_one_column(path, header[0])
    for number, cells in lines[1:]:
        if len(cells) != len(header):
            raise ValueError(
                f"{path}, line {number}, has {len(cells)} cells, and the header {len(header)}; a "
                "number has no separator of thousands."
            )
    return header, [
        (f"line {number}", dict(zip(header, map(str.strip, cells), strict=True)))
        for number, cells in lines[1:]
    ]


def _refuse_one_column(path: Path, header: str) -> None:
    """Raise ValueError for a table whose first line has no comma."""
    for separator, in_words in (("\t", "tabs"), (";", "semicolons")):
        if separator in header:
            raise ValueError(
                f"{path} is separated by {in_words}: expected commas between cells, and points in "
                "numbers."
            )
    raise ValueError(f"{path} is no CSV table: its first line has no comma between names.")


def _loss_table(
    name: str,
    header: Sequence[str],
    places_and_cells: Sequence[tuple[str, _Cells]],
    renamed: Mapping[str, str],
) -> LossTable:
    """Return the table of rows by the names of their columns. name: for messages."""
    if not places_and_cells:
        raise ValueError(f"{name} has no row below the names of its columns.")
    known_name_of = _known_names(name, header, renamed)
    length_of_column = _lengths_of_columns(name, known_name_of)
    unit = _unit_of_losses(name, known_name_of, length_of_column)
    rows: list[LossRow] = []
    for place, cells in places_and_cells:
        known_cells = {known_name_of[own]: cell for own, cell in cells.items()}
        reader = _RowReader(f"{name}, {place}", known_cells, unit)
        rows += reader.rows(length_of_column)
    if not rows:
        raise ValueError(f"{name} has no loss.")
    columns = {known for known in known_name_of.values() if known in COLUMNS}
    return LossTable(name, unit, frozenset(columns | {"length"}), tuple(rows))


def _known_names(name: str, header: Sequence[str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the name in COLUMNS, or that of a length, of each column by the table's own name."""
    for known, own in renamed.items():
        if known not in COLUMNS:
            raise ValueError(f"--columns: {known!r} is none of {', '.join(COLUMNS)}.")
        if own not in header:
            raise ValueError(f"--columns: {name} has no column {own!r}; it has {_quoted(header)}.")
    if {"measure", "at", "recipe"} <= set(header):
        raise ValueError(
            f"{name} is the results.csv of a run of posenc compare, with a row for each number: "
            "judge that run by posenc report FOLDER."
        )
    known_by_own = {own: known for known, own in renamed.items()}
    known_name_of: dict[str, str] = {}
    unknown: list[str] = []
    for own in header:
        known = known_by_own.get(own, own)
        if known in known_name_of.values() or header.count(own) > 1:
            raise ValueError(f"{name} has two columns {known!r}: keep one.")
        if known not in COLUMNS and not _WIDE_COLUMN.fullmatch(known):
            unknown.append(own)
        known_name_of[own] = known
    if unknown:
        raise ValueError(f"{name} has {_what_to_do_with(unknown, [*known_name_of.values()])}.")
    missing = [known for known in ("encoding", "seed") if known not in known_name_of.values()]
    if missing:
        raise ValueError(
            f"{name} has no column {missing[0]!r}; it has {_quoted(header)}. If it has another "
            f"name: --columns {missing[0]}=NAME."
        )
    return known_name_of


def _what_to_do_with(unknown: Sequence[str], names: Sequence[str]) -> str:
    """Return what to do with the columns whose names are not known. names: of all columns."""
    guess = _guess_of_name(unknown[0], names)
    example = f"such as --columns {guess}={unknown[0][:40]}"
    known = f"none of {', '.join(COLUMNS)}, nor a length"
    if len(unknown) == 1:
        return (
            f"a column {_shown(unknown[0])}, which is {known}: remove it, or say which it is, "
            f"{example}"
        )
    columns = join_names(map(_shown, unknown[:6]))
    return f"columns {columns}, which are {known}: remove them, or say which they are, {example}"


def _guess_of_name(own_name: str, names: Sequence[str]) -> str:
    """Return what a column of another name may be: the nearest of COLUMNS, otherwise the first that
    a table needs and this one, with columns of these `names`, lacks."""
    missing = [known for known in ("encoding", "seed", "length") if known not in names]
    nearest = get_close_matches(own_name.lower(), COLUMNS, n=1, cutoff=0.5)
    return [*nearest, *missing, "loss"][0]


def _quoted(names: Iterable[str]) -> str:
    """Return names in quotes, in words."""
    return join_names(map(repr, names))


def _lengths_of_columns(name: str, known_name_of: Mapping[str, str]) -> dict[str, int]:
    """Return the length of each column that has the losses at one length, by its name; {} for a
    table with one loss a row."""
    length_of_column = {}
    for known in known_name_of.values():
        match = _WIDE_COLUMN.fullmatch(known)
        if match is not None:
            length_of_column[known] = int(match[2])
    has_length = "length" in known_name_of.values()
    if bool(length_of_column) == has_length:
        raise ValueError(
            f"{name} must have a column 'length', or else one for each length, such as '512'"
            f"{', and has both' if has_length else ', and has neither'}."
        )
    if len(set(length_of_column.values())) < len(length_of_column):
        raise ValueError(f"{name} has two columns of one length.")
    return length_of_column


def _unit_of_losses(
    name: str, known_name_of: Mapping[str, str], length_of_column: Mapping[str, int]
) -> LossUnit:
    """Return the unit of the losses, by the names of their columns."""
    if length_of_column:
        matches = [_WIDE_COLUMN.fullmatch(column) for column in length_of_column]
        loss_columns = {match[1] or "loss" for match in matches if match is not None}
    else:
        loss_columns = {known for known in known_name_of.values() if known in UNIT_OF_COLUMN}
    if len(loss_columns) != 1:
        units = join_names(UNIT_OF_COLUMN)
        got = f"{join_names(sorted(loss_columns))}, which do not mix" if loss_columns else "none"
        raise ValueError(f"{name} must have losses in one of the columns {units}; it has {got}.")
    return UNIT_OF_COLUMN[loss_columns.pop()]


class _RowReader:
    """Reads one line of a table.

    place: where it stands, for messages. cells: by the names of COLUMNS.
    """

    def __init__(self, place: str, cells: _Cells, unit: LossUnit) -> None:
        self.place = place
        self.cells = cells
        self.unit = unit

    def rows(self, length_of_column: Mapping[str, int]) -> Iterator[LossRow]:
        """Yield the losses of the line: one, or one for each column of `length_of_column` whose
        cell is not empty."""
        if length_of_column:
            for column, length in length_of_column.items():
                if not _is_empty(self.cells.get(column)):
                    yield self._row(length, self._loss(column))
            return
        (column,) = (name for name in self.cells if name in UNIT_OF_COLUMN) or ("loss",)
        yield self._row(self._count("length", 1), self._loss(column))

    def _row(self, length: int, bits: float) -> LossRow:
        """Return the row of one loss."""
        position = self._optional_count("position")
        if position is not None and position >= length:
            raise self._error(f"position {position:,} is not in a window of length {length:,}")
        return LossRow(
            place=self.place,
            encoding=self._encoding(),
            seed=self._count("seed"),
            length=length,
            bits=bits,
            reading=self._reading(),
            size=self._size(),
            steps=self._optional_count("steps", 1),
            seconds=self._seconds(),
            task=self._task(),
            position=position,
        )

    def _error(self, problem: str) -> ValueError:
        return ValueError(f"{self.place}: {problem}.")

    def _text(self, column: str) -> str:
        """Return the text of a cell; "" if it is empty."""
        cell = self.cells.get(column)
        return "" if _is_empty_or_nan(cell) else str(cell).strip()

    def _encoding(self) -> str:
        name = self._text("encoding")
        if not name:
            raise self._error("it has no encoding")
        try:
            check_encoding_name(name)
        except ValueError as error:
            raise self._error(str(error).rstrip(".")) from None
        return name

    def _reading(self) -> str:
        reading = self._text("reading") or "trained"
        if reading not in READINGS:
            raise self._error(f"reading must be {' or '.join(READINGS)}, got {_shown(reading)}")
        return reading

    def _task(self) -> str:
        task = self._text("task") or "text"
        if len(task) > MAX_TASK_LETTERS:
            raise self._error(f"task must have at most {MAX_TASK_LETTERS} letters")
        return task

    def _count(self, column: str, minimum: int = 0) -> int:
        """Return the whole number of a cell, which must not be empty."""
        count = self._optional_count(column, minimum)
        if count is None:
            raise self._error(f"it has no {column}")
        return count

    def _optional_count(self, column: str, minimum: int = 0) -> int | None:
        """Return the whole number of a cell; None if it is empty."""
        cell = self.cells.get(column)
        if _is_empty_or_nan(cell):
            return None
        number = _whole_number(cell)
        if number is None or not minimum <= number < 2**53:
            raise self._error(
                f"{column} must be a whole number of at least {minimum}, such as 1024, got "
                f"{_shown(cell)}"
            )
        return number

    def _loss(self, column: str) -> float:
        """Return the loss of a cell in bits; NaN or infinite if it says so."""
        cell = self.cells.get(column)
        if _is_empty(cell):
            raise self._error(
                f"it has no {column}: write nan for a trial that failed, and no row for a length "
                "at which an encoding cannot run"
            )
        number = _real_number(cell)
        if number is None:
            raise self._error(
                f"{column} must be a number with a decimal point, such as 3.21, got {_shown(cell)}"
            )
        bits = number * self.unit.bits
        if math.isfinite(bits) and not 0 <= bits <= MAX_BITS:
            raise self._error(
                f"{column} must be from 0 to {MAX_BITS / self.unit.bits:.0f} {self.unit.words}, "
                f"got {_shown(cell)}; of a perplexity give its logarithm"
            )
        return bits

    def _size(self) -> int | None:
        """Return the number of parameters; None if it is not given."""
        text = self._text("size")
        match = _COUNT_WITH_SUFFIX.fullmatch(text)
        if match is not None:
            return round(float(match[1]) * _FACTOR_OF_SUFFIX[match[2].lower()])
        if text and _whole_number(self.cells["size"]) is None:
            raise self._error(
                f"size must be a number of parameters, such as 124M, got {_shown(text)}"
            )
        return self._optional_count("size", 1)

    def _seconds(self) -> float | None:
        """Return the seconds of training; None if they are not given."""
        cell = self.cells.get("seconds")
        if _is_empty_or_nan(cell):
            return None
        number = _real_number(cell)
        if number is None or not 0 < number < 1e12:
            raise self._error(f"seconds must be a number above 0, got {_shown(cell)}")
        return number


def _is_empty(cell: Any) -> bool:
    """Return True for a cell without content, such as None and pandas' <NA>."""
    return cell is None or str(cell).strip() in ("", "<NA>")


def _is_empty_or_nan(cell: Any) -> bool:
    """Return True also for NaN, by which pandas marks an empty cell; of a loss it says that the
    trial failed."""
    return _is_empty(cell) or (isinstance(cell, float) and math.isnan(cell))


def _shown(cell: Any) -> str:
    """Return a cell for a message, of a long text its beginning."""
    text = repr(cell) if isinstance(cell, str) else str(cell)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _whole_number(cell: Any) -> int | None:
    """Return the whole number that a cell holds, or writes: 128, 128.0 and "128"; None for any
    other."""
    if isinstance(cell, bool):
        return None
    if isinstance(cell, Integral):
        return int(cell)
    if isinstance(cell, Real):
        number = float(cell)
        return int(number) if number.is_integer() else None
    match = _WHOLE_NUMBER.fullmatch(str(cell).strip())
    return int(match[1]) if match is not None and len(match[1]) < 20 else None


def _real_number(cell: Any) -> float | None:
    """Return the number that a cell holds, or writes; None for anything else."""
    if isinstance(cell, bool):
        return None
    if isinstance(cell, Real):
        return float(cell)
    text = str(cell).strip()
    is_number = _NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text)
    return float(text) if is_number else None
