"""Check that a figure shows the numbers of its table, and no others."""

import numpy as np
from matplotlib.collections import QuadMesh

from posenc.report.chart import Chart


def assert_drawn_from_its_table(chart: Chart) -> None:
    """Fail for a point of a labelled curve, a bar or a cell whose number is not in the table."""
    columns = [np.asarray(column) for column in chart.data.values()]
    numbers = [column.astype(float) for column in columns if column.dtype.kind in "ifb"]
    known = np.unique(np.concatenate(numbers))
    known = known[np.isfinite(known)]
    seen = 0
    every = chart.figure.axes
    coloured = [each for axes in every for each in (*axes.images, *axes.collections)]
    bars = [each.colorbar.ax for each in coloured if each.colorbar is not None]
    for axes in (each for each in every if each not in bars):
        drawn = [np.asarray(line.get_ydata(), float) for line in axes.lines if _is_named(line)]
        drawn += [np.ma.filled(np.ma.asarray(i.get_array(), float), np.nan) for i in axes.images]
        drawn += [np.ravel(m.get_array()) for m in axes.collections if isinstance(m, QuadMesh)]
        drawn += [np.array([bar.get_height() for bar in axes.patches], float)]
        for values in drawn:
            values = values[np.isfinite(values)]
            right = np.clip(np.searchsorted(known, values), 1, len(known) - 1)
            apart = np.minimum(abs(known[right] - values), abs(known[right - 1] - values))
            wrong = values[~(apart <= 1e-6 * np.maximum(1, abs(values)))]
            assert not wrong.size, f"drawn, and not in the table: {wrong[:5]}"
            seen += values.size
    assert seen or not any(map(len, columns)), "nothing of the table is drawn"


def _is_named(line) -> bool:
    """Return True unless a line is a scale's or decoration, whose names begin with "_"."""
    return not str(line.get_label()).startswith("_")
