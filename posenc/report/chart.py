"""A figure and the table that it is drawn from, which its CSV file has.

data = long_table("distance, tokens", "score, logits", {"rope": ([1, 2], [0.5, 0.25])})
chart = Chart(data, draw)  # `draw` takes `data` and returns a matplotlib Figure
"""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from posenc.report.escaping import show_hidden_characters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Column = Sequence[Any] | np.ndarray
Data = Mapping[str, Column]
"""Columns of one length, by the names that are labels of axes: words, or numbers with NaN or None
where there is none."""
SERIES, PANEL, LOW, HIGH = "series", "panel", "low", "high"
"""Columns that are no axis: the name of a curve, the title of a panel, the ends of an interval."""


@dataclass(frozen=True)
class Chart:
    """A figure and the table that it is drawn from.

    draw: makes the figure from `data`, and from nothing else that was measured.
    """

    data: Data
    draw: "Callable[[Data], Figure]"

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.data.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Chart: columns of one length are needed, got {lengths}.")

    @cached_property
    def figure(self) -> "Figure":
        """Return the figure, drawn once."""
        return self.draw(self.data)


def long_table(
    x_name: str,
    y_name: str,
    curves: Mapping[str, Sequence[Column]],
    *more_names: str,
    by: str = SERIES,
) -> Data:
    """Return a table of curves, the rows of one below those of the other.

    >>> long_table("step", "loss", {"rope": ([1, 2], [3.0, 2.5])})
    {'series': ['rope', 'rope'], 'step': [1, 2], 'loss': [3.0, 2.5]}

    curves: the columns of each curve by its name, in the order of x_name, y_name and more_names,
    which are their names. by: name of the column with the curves' names.
    """
    columns: dict[str, list[Any]] = {name: [] for name in (by, x_name, y_name, *more_names)}
    for name, curve in curves.items():
        columns[by] += [name] * len(curve[0])
        for column, values in zip((x_name, y_name, *more_names), curve, strict=True):
            columns[column] += list(values)
    return columns


def matrix_table(
    x_name: str, y_name: str, unit: str, xs: Column, ys: Column, values: np.ndarray
) -> Data:
    """Return a matrix as a table with a row for each cell, row by row of the matrix.

    x_name, y_name: names of the columns with the places of a cell; if they are equal, "(column)"
    and "(row)" are appended. unit: name of the column with the values. xs, ys: the places.
    values: (ys, xs).
    """
    if x_name == y_name:
        x_name = f"{x_name} (column)"
        y_name = f"{y_name} (row)"
    return {
        x_name: np.tile(np.asarray(xs), len(ys)),
        y_name: np.repeat(np.asarray(ys), len(xs)),
        unit: np.asarray(values, dtype=float).ravel(),
    }


def split_by_series(data: Data, by: str = SERIES) -> dict[Any, dict[str, np.ndarray]]:
    """Split a table: return the rows of each value in the column `by` as a table of its own,
    without that column. The values keep their order; it undoes `long_table`.

    {"series": ["rope", "rope"], "loss": [3.0, 2.5]} -> {"rope": {"loss": array([3.0, 2.5])}}
    """
    series_of_rows = np.asarray(data[by], dtype=object)
    other_columns = {name: np.asarray(column) for name, column in data.items() if name != by}
    return {
        series: {name: column[series_of_rows == series] for name, column in other_columns.items()}
        for series in dict.fromkeys(series_of_rows.tolist())
    }


def axis_names(data: Data) -> list[str]:
    """Return the names of the columns that the axes of a figure show: x, y, and for a matrix the
    column of its values, whose name is their unit."""
    return [name for name in data if name not in (SERIES, PANEL, LOW, HIGH)]


def describe_curve_ends(data: Data) -> str:
    """Return the first and the last point of each curve in words, "rope: 3 at 1, 2.5 at 1,000.";
    "" for a table without curves."""
    names = axis_names(data)
    if SERIES not in data or len(names) != 2:
        return ""
    x_name, y_name = names
    descriptions = []
    for name, curve in split_by_series(data).items():
        end_indices = dict.fromkeys([0, len(curve[x_name]) - 1])  # once for a curve of one point
        points_in_words = (
            f"{curve[y_name][i]:.3g} at {_place_in_words(curve[x_name][i])}" for i in end_indices
        )
        descriptions.append(f"{name}: {', '.join(points_in_words)}")
    return f"{'; '.join(descriptions)}."


def _place_in_words(place: Any) -> str:
    """Return a place on an axis as text: 4096 -> "4,096"; a word stays."""
    return place if isinstance(place, str) else f"{place:,g}"


def csv_text(data: Data) -> str:
    """Return the table as CSV. Numbers have nine digits; what is unknown is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(map(show_hidden_characters, data))
    writer.writerows(
        [_csv_cell(value) for value in row] for row in zip(*data.values(), strict=True)
    )
    return buffer.getvalue()


def _csv_cell(value: Any) -> str:
    """Return a word or a number as the text of a CSV cell; "" for None or NaN."""
    if value is None or isinstance(value, str):
        return show_hidden_characters(value or "")
    return "" if np.isnan(value) else f"{value:.9g}"
