"""Write the numbers of docs/extend.md and the README's figure: extend_docs.py RESULTS [DOCS]"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

from posenc.files.atomic import write_atomically
from posenc.report.drawing import (
    draw_legend_above,
    figure,
    line_styles,
    set_length_axis,
    write_svg,
)

TRAINED = 256
LABELS = {
    "none": "as trained",
    "window": f"as trained, a window of {TRAINED}",
    "tuned": "`ntk-2x`, tuned 200 steps",
    "lora": "`ntk-2x`, adapters tuned 200 steps",
}
DRAWN = {
    "none": "as trained",
    "linear": "linear",
    "ntk": "ntk",
    "yarn": "yarn",
    "ntk-2x": "ntk-2x",
    "tuned": "ntk-2x, tuned",
}
COSTS = {
    "quick": "`--method ntk --out`",
    "all": "all methods, without `--out`",
    "tuned": "`--method ntk-2x --tune 200 --out`",
    "lora": "the same with `--lora 8`",
}


class Bucket(NamedTuple):
    """Perplexity of the tokens from start to stop."""

    start: int
    stop: int
    loss: float
    tokens: int


Curves = dict[str, list[Bucket]]


def read(path: Path) -> Curves:
    """Return the losses of each method by bucket of positions, from a CSV."""
    found: Curves = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            bucket = Bucket(
                int(row["start"]), int(row["stop"]), float(row["loss"]), int(row["tokens"])
            )
            found.setdefault(row["method"], []).append(bucket)
    return found


def short_ratio(curve: list[Bucket], base: list[Bucket]) -> float:
    """Return the perplexity inside the trained length, as a multiple of that of the model as
    trained."""

    def mean(buckets: list[Bucket]) -> float:
        within = [b for b in buckets if b.stop <= TRAINED]
        return sum(b.loss * b.tokens for b in within) / sum(b.tokens for b in within)

    return math.exp(mean(curve) - mean(base))


def by_position(curves: Curves) -> str:
    """Return a Markdown table: a row per method, a column per bucket, and what the short range
    costs."""
    base = curves["none"]
    header = ["", f"0–{base[0].stop}", *(f"–{b.stop}" for b in base[1:]), f"first {TRAINED}"]
    rows = [header, ["---"] * len(header)]
    for name, curve in curves.items():
        values = [_perplexity(b.loss) for b in curve]
        label = LABELS.get(name, f"`{name}`")
        rows.append([label, *values, f"× {short_ratio(curve, base):.2f}"])
    return "\n".join(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)


def _perplexity(loss: float) -> str:
    value = math.exp(loss)
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def searched(config: dict) -> str:
    """Return in a sentence what the search found."""
    rope = config["rope_parameters"]
    factors = ", ".join(f"{f:.2f}" for f in rope["long_factor"])
    logits = rope["attention_factor"] ** 2
    return f"The search found wavelengths × {factors} and logits × {logits:.2f}."


def against_window(curves: Curves) -> str:
    """Return in a sentence how far the tuned checkpoint is from a window, and what it lost."""
    far = max(
        math.exp(b.loss - w.loss) - 1
        for b, w in zip(curves["tuned"], curves["window"], strict=True)
        if b.stop > TRAINED
    )
    lost = short_ratio(curves["tuned"], curves["none"]) - 1
    return (
        f"Tuned, the worst bucket beyond {TRAINED} is {_apart(far)} the window, and the first "
        f"{TRAINED} tokens are {_apart(lost)} what they were."
    )


def _apart(share: float) -> str:
    return f"{abs(100 * share):.1f} % {'above' if share > 0 else 'below'}"


def costs(path: Path) -> str:
    """Return two Markdown tables: the time of the commands, and the memory by length."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    time = ["| command | seconds | CPU seconds |", "| --- | --- | --- |"]
    for name, label in COSTS.items():
        row = rows[name]
        time.append(f"| {label} | {float(row['seconds']):.0f} | {float(row['cpu_seconds']):.0f} |")
    memory = {name.removeprefix("memory-"): r for name, r in rows.items() if "memory" in name}
    lengths = ["| new length, tokens |", "| --- |", "| peak memory, MB |"]
    for length, row in memory.items():
        for i, cell in enumerate([f"{int(length):,}", "---", row["peak_megabytes"]]):
            lengths[i] += f" {cell} |"
    return "\n".join([*time, "", *lengths])


def with_block(document: str, name: str, text: str) -> str:
    """Return the document with `text` between the markers of this name."""
    start, end = f"<!-- numbers: {name} -->\n", "<!-- end of numbers -->"
    pattern = re.escape(start) + ".*?" + re.escape(end)
    replaced, count = re.subn(pattern, lambda _: f"{start}{text}\n{end}", document, flags=re.S)
    if count != 1:
        raise ValueError(f"{name}: expected one pair of markers, found {count}.")
    return replaced


def write_figure(curves: Curves, path: Path) -> None:
    styles = line_styles(list(DRAWN))
    shown = {name: curves[name] for name in DRAWN}
    with figure("position in the window, tokens", "perplexity") as (drawn, axes):
        for name, buckets in shown.items():
            middles = [(b.start + b.stop) / 2 for b in buckets]
            values = [math.exp(b.loss) for b in buckets]
            axes.plot(middles, values, label=DRAWN[name], **styles[name].arguments_for_points())
        axes.set_yscale("log")
        axes.set_yticks([10, 30, 100, 300], ["10", "30", "100", "300"])
        axes.minorticks_off()
        set_length_axis(axes, [b.stop for b in shown["none"]], TRAINED)
    draw_legend_above(drawn)
    ends = (f"{DRAWN[name]}: {math.exp(b[-1].loss):.1f} at the end" for name, b in shown.items())
    write_svg(drawn, path, "; ".join(ends))


def main(results: Path, docs: Path) -> None:
    """Write what the results say into docs/extend.md and docs/figures/extend.svg."""
    untuned, tuned = read(results / "all.csv"), read(results / "tuned.csv")
    tuned["lora"] = read(results / "lora.csv")["tuned"]
    config = json.loads((results / "searched.json").read_text(encoding="utf-8"))
    blocks = {
        "untuned": by_position(untuned),
        "searched": searched(config),
        "tuned": f"{by_position(tuned)}\n\n{against_window(tuned)}",
        "costs": costs(results / "cost.csv"),
    }
    page = docs / "extend.md"
    text = page.read_text(encoding="utf-8")
    for name, block in blocks.items():
        text = with_block(text, name, block)
    write_atomically(page, text)
    write_figure({**untuned, "tuned": tuned["tuned"]}, docs / "figures" / "extend.svg")


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    main(given[0], given[1] if len(given) > 1 else Path(__file__).parents[1] / "docs")
