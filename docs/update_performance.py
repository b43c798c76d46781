"""Write docs/performance.md from what `posenc bench` measured; run by `make performance`.

python docs/update_performance.py [RESULTS.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from posenc.bench.cases import CASES, GROUPS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results/performance.json"

NOTES = {
    "attention": "Forward without gradients, causal, 8 heads of 64; `8 x 128` is a batch of 8 "
    "rows. `prepared`: what depends on positions and weights only was computed before the call.",
    "backward": "The same with the gradients of q, k, v and the encoding's parameters.",
    "memory": "MiB at the peak, counted by torch's allocator, on one thread.",
    "layer": "`posenc.Attention` of width 512, forward, next to projections around SDPA.",
    "rotation": "Over a clone / over transformers. q has 32 heads, k 8, of 64 channels. Each call "
    "computes its tables and writes to memory of its own. A clone of 32 MiB takes 4 or 20 ms, as "
    "the C library has memory left or asks the system for it, so ratios to it vary.",
    "decode": "Over Llama with `sdpa` / with `eager`. `posenc.Decoder` and `LlamaForCausalLM`, two "
    "layers of width 512.",
    "training": "Over Llama with `sdpa` / with `eager`, both in float32. Four layers of width 128 "
    "on 32 x 128 tokens, as in `posenc compare`: forward, backward, clipping, AdamW. In `bfloat16` "
    "only posenc's models and the last column run under autocast.",
    "attach": "Two layers of width 512, 2,048 tokens, next to the same model as it was.",
}

OPTIONS = {
    "--only GROUPS, --quick, --all": f"measure these groups only: {', '.join(GROUPS)}; small "
    "cases for a second each; or also those of a minute or 2 GB",
    "--repeats N, --threads 1,2": "rounds of each case, instead of 7 to 101 in ten seconds; with "
    "one thread of torch, then with two",
    "--lengths 1024,4096, --heads, --kv-heads, --head-dim": "sizes, instead of each case's own",
    "--device cuda": "check every encoding on a GPU against float64 on the CPU, then time its "
    "kernels",
    "--out PATH, --json": "write everything to a file; print it for programs",
}

RUNS_DOWN = ("attention", "backward", "layer")
"""Tables with a row for each run; the others have one for each case."""


def page(found: dict[str, Any]) -> str:
    """The whole page, from what `posenc bench --out` wrote."""
    machine, rows = found["machine"], found["rows"]
    timed = [row["rounds"] for row in rows if "rounds" in row]
    threads = sorted({row["threads"] for row in rows if "rounds" in row})
    lines = [
        "# bench: what posenc costs",
        "",
        "Task: measure time and memory of every encoding on your machine, next to plain attention "
        "and to transformers' Llama.",
        "",
        "## Command",
        "",
        "```sh",
        "posenc bench --quick                # small cases of all groups",
        "posenc bench --device cuda          # right on this GPU? then how fast?",
        "```",
        "",
        "| option | what it does |",
        "|---|---|",
        *(f"| `{'`, `'.join(names.split(', '))}` | {said} |" for names, said in OPTIONS.items()),
        "",
        "## How to read it",
        "",
        "[`performance.json`](../benchmarks/results/performance.json) has the numbers of this "
        "page; `make performance` measures them anew and writes it. What one GPU showed is in "
        f"[LOG.md](../results/LOG.md). Measured on {machine['date']} on {machine['device']}, "
        f"{machine['cores']} cores, with torch {machine['torch']}, "
        f"transformers {machine.get('transformers', '-')} and Python {machine['python']}, "
        "in float32 unless a column says otherwise.",
        "A cell is the ratio of two times: the median of interleaved rounds in one process, with "
        f"its 95 % interval ({min(timed)} to {max(timed)} rounds). The run that the others are "
        "divided by shows its time instead.",
    ]
    if len(threads) > 1:
        lines[-1] += (
            f" The lines of a cell are for {' and '.join(map(str, threads))} threads: CPU time of "
            "the thread with one, wall time with more."
        )
    for group, question in GROUPS.items():
        if mine := [row for row in rows if row["group"] == group]:
            lines += ["", f"### {question}", NOTES[group], "", *table(group, mine)]
    return "\n".join(lines) + "\n"


def table(group: str, rows: list[dict[str, Any]]) -> list[str]:
    """Cases by runs, or runs by cases."""
    bases = {case.group: case.baselines for case in CASES}[group]
    axes = "case", "run"
    across, down = axes if group in RUNS_DOWN else axes[::-1]
    titles = dict.fromkeys(row[across] for row in rows)
    lines = [f"| {' | '.join(('', *titles))} |", "|---" * (len(titles) + 1) + "|"]
    for name in dict.fromkeys(row[down] for row in rows):
        cells = (
            "<br>".join(
                cell(row, bases) for row in rows if (row[across], row[down]) == (title, name)
            )
            for title in titles
        )
        lines.append(f"| {' | '.join((name, *cells))} |")
    return lines


def cell(row: dict[str, Any], bases: tuple[str, ...]) -> str:
    """Memory; or the ratio to each of `bases` with its interval, and the time of one of them."""
    if "mib" in row:
        return f"{row['mib']:.1f}"
    parts = []
    for base in bases:
        if row["run"] == base:
            time = row["milliseconds"]
            parts.append(f"{time:.3g} ms" if time < 1000 else f"{time:,.0f} ms")
        elif found := row["ratios"].get(base):
            parts.append("{:.2f} ({:.2f}-{:.2f})".format(*found))
    return " / ".join(parts)


if __name__ == "__main__":
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    PAGE.write_text(page(json.loads(results.read_text(encoding="utf-8"))), encoding="utf-8")
