"""Draw the README's figure of an extension: extend_figure.py FOLDER_OF_CSV FIGURE.svg"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

from posenc.drawing import figure, legend_above, length_axis, line_styles, write_svg

TRAINED = 256
NAMES = {
    "none": "as trained",
    "ntk": "NTK-aware, x4",
    "search": "searched",
    "tuned": "tuned",
}


def read(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    """Middle and end of each bucket with its perplexity, by method."""
    curves: dict[str, list[tuple[float, int, float]]] = {}
    for path in sorted(folder.glob("*.csv")):
        found: dict[str, list[tuple[float, int, float]]] = {}
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                start, stop = int(row["start"]), int(row["stop"])
                bucket = ((start + stop) / 2, stop, math.exp(float(row["loss"])))
                found.setdefault(row["method"], []).append(bucket)
        curves |= {name: found[name] for name in found if name in NAMES}
    return {name: curves[name] for name in NAMES if name in curves}


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    curves = read(source)
    styles = line_styles(list(curves))
    with figure("position in the window, tokens", "perplexity") as (drawn, axes):
        for name, buckets in curves.items():
            middles = [middle for middle, _, _ in buckets]
            values = [value for _, _, value in buckets]
            axes.plot(middles, values, label=NAMES[name], **styles[name].points())
        axes.set_yscale("log")
        axes.set_yticks([10, 30, 100, 300], ["10", "30", "100", "300"])
        axes.minorticks_off()
        length_axis(axes, [stop for _, stop, _ in next(iter(curves.values()))], TRAINED)
    legend_above(drawn)
    ends = (f"{NAMES[name]}: {buckets[-1][2]:.1f} at the end" for name, buckets in curves.items())
    write_svg(drawn, target, "; ".join(ends))
