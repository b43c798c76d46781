"""Read the numbers of a figure from the figure itself, so that both always agree.

Every line, bar and matrix of a figure must have a label. matplotlib leaves labels that begin with
an underscore out of the legend. "_" is decoration without numbers.
"""

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection, QuadMesh
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from posenc.report.page.drawing import DECORATION

Row = dict[str, Any]


def csv_text(drawn: Figure) -> str:
    """Return a CSV with one row per point: panel and series if there are several, the axes by their
    labels, and low and high if an interval is drawn. Numbers have nine digits; gaps are empty.

    Raises: ValueError for a line without a label.
    """
    bars = _colorbars(drawn)
    rows = [row for axes in drawn.axes if axes not in bars for row in _rows(axes, drawn)]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    for key in ("panel", "series"):
        if all(not row.get(key) for row in rows):
            keys = [k for k in keys if k != key]
    out = io.StringIO()
    writer = csv.DictWriter(out, keys, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return out.getvalue()


def _rows(axes: Axes, drawn: Figure) -> Iterator[Row]:
    panel = axes.get_title(loc="left")
    x_name = axes.get_xlabel() or drawn.get_supxlabel() or "column"
    y_name = axes.get_ylabel() or drawn.get_supylabel() or "row"
    if x_name == y_name:
        x_name, y_name = f"{x_name} (column)", f"{y_name} (row)"

    def row(series: str, x: Any, y: Any, **more: Any) -> Row:
        named = "" if series == DECORATION else series.removeprefix("_")
        return {"panel": panel, "series": named, x_name: x, y_name: y, **more}

    bands, (x_names, y_names) = _bands(axes), _named_ticks(drawn)
    parts: set[int] = set()
    for container in axes.containers:
        label = str(container.get_label())
        if isinstance(container, ErrorbarContainer):
            line, caps, bars = container.lines
            parts |= {id(part) for part in (line, *caps)}
            ends = [segment[:, 1] for bar in bars for segment in bar.get_segments()]
            for (x, y), (low, high) in zip(np.asarray(line.get_xydata()), ends, strict=True):
                yield row(label, x, y, low=low, high=high)
        elif isinstance(container, BarContainer):
            for bar in container.patches:
                middle = bar.get_x() + bar.get_width() / 2
                yield row(label, _name(x_names, round(middle)), bar.get_height())
    for line in axes.lines:
        if id(line) in parts or line.get_transform() != axes.transData:
            continue
        label = str(line.get_label())
        if label.startswith("_child"):
            raise ValueError(f"A line of the figure {axes.get_ylabel()!r} has no name.")
        if label == DECORATION:
            continue
        band = bands.get(label.removeprefix("_"), {})
        for x, y in np.asarray(line.get_xydata(), dtype=float):
            low, high = band.get(float(x), (None, None))
            yield row(label, x, y, **({"low": low, "high": high} if band else {}))
    for image in axes.images:
        left, right, bottom, top = image.get_extent()
        values = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
        height, width = values.shape
        for (i, j), value in np.ndenumerate(values):
            x = left + (j + 0.5) * (right - left) / width
            y = top + (i + 0.5) * (bottom - top) / height
            at = row("", _name(x_names, x), _name(y_names, y))
            yield {**at, _unit(image, drawn): value}
    for mesh in axes.collections:
        if isinstance(mesh, QuadMesh):
            corners = np.asarray(mesh.get_coordinates())
            values = np.asarray(mesh.get_array()).reshape(len(corners) - 1, -1)
            for (i, j), value in np.ndenumerate(values):
                x, y = corners[i, j, 0], corners[i : i + 2, j, 1].mean()
                yield {**row("", x, _name(y_names, y)), _unit(mesh, drawn): value}


def _bands(axes: Axes) -> dict[str, dict[float, tuple[float, float]]]:
    """Return low and high by x of each area drawn by fill_between, by label."""
    bands: dict[str, dict[float, tuple[float, float]]] = {}
    for collection in axes.collections:
        if isinstance(collection, PolyCollection) and not isinstance(collection, QuadMesh):
            band = bands.setdefault(str(collection.get_label()).removeprefix("_"), {})
            for path in collection.get_paths():
                for x, y in np.asarray(path.vertices, dtype=float).tolist():
                    low, high = band.get(x, (y, y))
                    band[x] = (min(low, y), max(high, y))
    return bands


def _colorbars(drawn: Figure) -> list[Axes]:
    coloured = [each for axes in drawn.axes for each in (*axes.images, *axes.collections)]
    return [each.colorbar.ax for each in coloured if each.colorbar is not None]


def _unit(drawn: Any, whole: Figure) -> str:
    """Return the label of the colorbar; panels may share the figure's."""
    bars = [drawn.colorbar.ax] if drawn.colorbar is not None else _colorbars(whole)
    return " ".join(bars[0].get_ylabel().split()) if bars else "value"


def _named_ticks(drawn: Figure) -> tuple[dict[float, str], dict[float, str]]:
    """Return the text of named ticks of both axes by place; panels of a figure share them."""
    found: tuple[dict[float, str], dict[float, str]] = ({}, {})
    for axes in drawn.axes:
        for axis, names in zip((axes.xaxis, axes.yaxis), found, strict=True):
            if isinstance(axis.get_major_locator(), FixedLocator) and not names:
                places = np.asarray(axis.get_majorticklocs())
                words = axis.get_major_formatter().format_ticks(places.tolist())
                names.update(zip(places, words, strict=True))
    return found


def _name(names: dict[float, str], at: float) -> Any:
    """Return the text at a place, or the number if there is none."""
    return next((name for place, name in names.items() if abs(place - at) < 0.25), at)


def _cell(value: Any) -> str:
    if isinstance(value, str):
        plain = value.replace(",", "")
        return plain if plain.isdigit() else value
    return "" if value is None or np.isnan(value) else f"{value:.9g}"
