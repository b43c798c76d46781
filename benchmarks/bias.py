"""What does a score bias cost over attention without one? About 10 minutes on one core.

python benchmarks/bias.py OUT.csv [FIGURE.svg]

With a figure's path it also draws the figure; if OUT.csv exists, it only draws.
"""

import csv
import sys
from pathlib import Path

import torch
from matplotlib import pyplot as plt

from posenc.bench import bias, measure

DISTANCE = ("alibi", "t5", "kerple", "sandwich")
CONTENT = ("shaw", "transformer_xl", "deberta", "fire", "cope", "fox")


def run(out: Path) -> None:
    """Measure the most important parts first and save after each, so that it may be stopped."""
    torch.set_num_threads(1)
    parts = (
        lambda: bias.measure_bias(DISTANCE, (1024,), 21, backward=False),
        lambda: bias.measure_bias(DISTANCE, (2048, 4096), 7, backward=False),
        lambda: bias.measure_bias(CONTENT, (4096,), 5, backward=False),
        lambda: bias.measure_bias(("t5",), (4096,), 5, backward=True),
        lambda: bias.measure_bias(DISTANCE, (8192,), 5, backward=False),
        lambda: bias.measure_memory(DISTANCE + CONTENT, (1024, 2048, 4096, 8192, 16384)),
        lambda: bias.measure_bias(DISTANCE, (16384,), 3, backward=False),
        lambda: bias.measure_bias(
            ("alibi", "t5", "deberta"), (4096,), 1, backward=False, peers=True
        ),
        lambda: bias.measure_bias(CONTENT, (4096,), 1, backward=True),
        lambda: bias.measure_bias(("alibi", "t5"), (4096,), 3, backward=False, flex=True),
    )
    found = []
    for part in parts:
        found += (rows := part())
        if "p50_ms" not in rows[0]:
            measure.show_rows(rows)  # the others show themselves
        measure.save_rows(found, out)


def draw(table: Path, figure: Path) -> None:
    """Time over attention without a bias: by length, and at 4096 beside other libraries."""
    with table.open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["question"] == "bias" and r["pass"] == "fwd"]
    fig, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=(1, 1.4))
    for name in DISTANCE:
        points = {int(r["n"]): float(r["ratio"]) for r in reversed(rows) if r["case"] == name}
        left.plot(sorted(points), [points[n] for n in sorted(points)], marker="o", label=name)
    left.axhline(1, color="0.6", linewidth=0.8)
    left.set_xscale("log", base=2)
    left.set_ylim(0.4, 1.3)
    left.set_xlabel("tokens")
    left.set_ylabel("time over attention without a bias")
    left.legend(frameon=False)
    bars = {r["case"]: float(r["ratio"]) for r in reversed(rows) if r["n"] == "4096"}
    bars = {name: ratio for name, ratio in bars.items() if name != bias.FLOOR}
    names = sorted(bars, key=bars.__getitem__)
    ours = ["#1f77b4" if n in DISTANCE + CONTENT else "0.7" for n in names]
    right.barh(names, [bars[n] for n in names], color=ours)
    right.bar_label(right.containers[0], fmt="%.1f", padding=2)  # type: ignore[arg-type]
    right.set_xscale("log")
    right.set_xlim(right=40)
    right.set_xlabel("the same at 4096 tokens; grey: others")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    fig.tight_layout()
    fig.savefig(figure, metadata={"Date": None})


if __name__ == "__main__":
    table = Path(sys.argv[1])
    if len(sys.argv) < 3 or not table.exists():
        run(table)
    if len(sys.argv) > 2:
        draw(table, Path(sys.argv[2]))
