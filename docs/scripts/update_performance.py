"""Write docs/performance.md, and performance.csv with all rows and their intervals, from what
`posenc bench` and experiments/gpu_queue.py measured; run by `make performance`.

python docs/scripts/update_performance.py [RESULTS.json]
"""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from posenc.bench.cases import CASES, GROUPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/performance.md"
RESULTS = ROOT / "benchmarks/results/performance.json"
GPU = ROOT / "benchmarks/results/gpu.jsonl"
CSV = ROOT / "benchmarks/results/performance.csv"

TABLES = {
    "training": "What does an encoding cost in training?",
    "prefill": "What does it cost to read a text, as before the first token of an answer?",
    "decoding": "What does it cost for each new token, with a long text in the cache?",
}
NOTES = {
    "training": "Attention forward and backward, with the gradients of q, k, v and of the "
    "encoding's parameters.",
    "prefill": "Attention forward, without gradients.",
    "decoding": "Attention of one query. On the CPU rope and transformer_xl rotate or project all "
    "keys again, which a cache saves; `prepared`: what depends on positions and weights only was "
    "computed before.",
}
ON_CPU = {
    "training": ("backward", {"1k": "1k", "4k": "4k"}),
    "prefill": ("attention", {"1k": "1k", "4k": "4k", "16k": "16k"}),
    "decoding": ("attention", {"1 query, 4k keys": "4k"}),
}
"""For each table the group of the bench, and the title of each of its cases that is a column."""
ON_GPU = {
    "training": ("kernels", "both", "sdpa_both"),
    "prefill": ("kernels", "forward", "sdpa_forward"),
    "decoding": ("decode", "forward", "sdpa_forward"),
}
"""For each table the kind of the queue's rows, the time of an encoding and that of SDPA."""
LENGTHS = (2048, 8192, 32_768)
OTHERS = ("memory", "layer", "decode", "training", "attach")
"""Groups of the bench that have a line instead of a table; rotation is in the CSV only."""
NOT_RUN = "not run"
MENDED = {
    "fire": "its kernel did not compile at heads of 64, as it asked for 240 of 227 KiB of shared "
    "memory",
    "fox": "reading all differences of its running sums took 44 times as long as SDPA at 8k, and "
    "23 times with the backward pass",
}
"""What was seen of an encoding on the GPU, and mended, so that its rows have to be run again."""

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


def page(found: dict[str, Any], gpu: dict[str, dict[str, Any]]) -> str:
    """Return the whole page, from what `posenc bench --out` and the GPU's queue wrote."""
    machine, rows = found["machine"], fullest(found["rows"])
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
        "A number is how many times as long attention takes with the encoding as without: torch's "
        "`scaled_dot_product_attention`, whose time is in the first row. All attention is causal.",
        "",
        f"- GPU: {gpu_facts(gpu)}",
        f"- CPU: {machine['device']}, {machine['cores']} cores, {machine['date']}, torch "
        f"{machine['torch']}, transformers {machine.get('transformers', '-')}, Python "
        f"{machine['python']}. float32, 8 heads of 64. Median of interleaved rounds in one "
        "process, on all cores.",
        "",
        "[performance.csv](../benchmarks/results/performance.csv) has every row, with its 95 % "
        "interval, one thread of the CPU too, other sizes and rotation. `make performance` "
        "measures the CPU anew, `experiments/gpu_queue.py` a GPU. What did not pay is in "
        "[LOG.md](../results/LOG.md).",
    ]
    for name, question in TABLES.items():
        lines += ["", f"## {question}", "", NOTES[name], "", *table(name, rows, gpu)]
    lines += ["", "## Also measured", "", *also_on_gpu(gpu)]
    for group in OTHERS:
        lines += also(group, [row for row in rows if row["group"] == group])
    return "\n".join(lines) + "\n"


def fullest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with the most threads of each case and run."""
    chosen: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = row["group"], row["case"], row["run"]
        if key not in chosen or row["threads"] > chosen[key]["threads"]:
            chosen[key] = row
    return list(chosen.values())


def gpu_facts(gpu: dict[str, dict[str, Any]]) -> str:
    """Return which GPU was measured, when and how."""
    timed = [row for name, row in gpu.items() if name.startswith(("kernels/", "decode/"))]
    if not timed:
        return f"{NOT_RUN}."
    said = [", ".join(sorted({row[fact] for row in timed})) for fact in ("device", "date", "torch")]
    return (
        f"{said[0]}, {said[1]}, torch {said[2]}. bfloat16, 16 heads of 64 channels; in decoding 4 "
        "rows, 16 heads of 128. Median time of the GPU alone, with calls queued."
    )


def table(name: str, rows: list[dict[str, Any]], gpu: dict[str, dict[str, Any]]) -> list[str]:
    """Return a table with a row for each encoding, and columns for a GPU and for the CPU."""
    group, titles = ON_CPU[name]
    on_cpu = {(row["run"], row["case"]): row for row in rows if row["group"] == group}
    kind, _, _ = ON_GPU[name]
    names = [run for run, _ in on_cpu] + [
        row.split("/")[1] for row in gpu if row.startswith(f"{kind}/")
    ]
    names = [run for run in dict.fromkeys(names) if run != "SDPA" and is_encoding(run)]
    order = [row["run"] for row in rows if row["group"] == "attention"]
    names.sort(key=lambda run: order.index(run) if run in order else len(order))
    heads = [f"GPU, {length // 1024}k" for length in LENGTHS]
    heads += [f"CPU, {title}" for title in titles.values()]
    lines = [f"| {' | '.join(('', *heads))} |", "|---" * (len(heads) + 1) + "|"]
    for run in ("SDPA", *names):
        cells = [gpu_cell(gpu, name, run, length) for length in LENGTHS]
        cells += [cpu_cell(on_cpu.get((run, case))) for case in titles]
        if any(cell != NOT_RUN for cell in cells):
            lines.append(f"| {' | '.join((run, *cells))} |")
    return lines


def is_encoding(run: str) -> bool:
    """Return True unless a run names an implementation, as "alibi,table" does."""
    return "," not in run or run.endswith(", prepared")


def cpu_cell(row: dict[str, Any] | None) -> str:
    """Return the ratio to SDPA, or SDPA's time."""
    if row is None:
        return NOT_RUN
    return milliseconds(row["milliseconds"]) if row["run"] == "SDPA" else ratio(row, "SDPA")


def gpu_cell(gpu: dict[str, dict[str, Any]], name: str, run: str, length: int) -> str:
    """Return the ratio to SDPA, or SDPA's median time in all rows of this length."""
    kind, time, base = ON_GPU[name]
    if run == "SDPA":
        times = [
            row["result"][base]
            for key, row in gpu.items()
            if key.startswith(f"{kind}/") and key.endswith(f"/{length}") and base in row["result"]
        ]
        return milliseconds(sorted(times)[len(times) // 2]) if times else NOT_RUN
    result = gpu.get(f"{kind}/{run}/{length}", {}).get("result", {})
    return f"{result[time] / result[base]:.2f}" if {time, base} <= {*result} else NOT_RUN


def milliseconds(time: float) -> str:
    return f"{time:.3g} ms" if time < 1000 else f"{time:,.0f} ms"


def ratio(row: dict[str, Any], base: str) -> str:
    return f"{row['ratios'][base][0]:.2f}"


def also_on_gpu(gpu: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines about correctness, other implementations and rotation on a GPU."""
    found = {name: row["result"] for name, row in gpu.items() if "result" in row}
    checked = [row["checks"] for name, row in found.items() if name.startswith("correct/")]
    lines = []
    if checked:
        done = [check for checks in checked for check in checks if "left_out" not in check]
        right = sum(check["ok"] for check in done)
        lines.append(
            f"- GPU, is it right? {right:,} of {len(done):,} checks of {len(checked)} encodings, "
            "in float32, bfloat16 and float16, next to float64 on the CPU."
        )
    same = {name.split("/")[1]: row for name, row in found.items() if name.startswith("same/")}
    if same:
        said = ", ".join(
            f"{name} {'yes' if row['same'] else 'no'}" for name, row in sorted(same.items())
        )
        lines.append(
            f"- GPU, two training steps with deterministic algorithms, the same bits? {said}."
        )
    other = [
        f"{name.replace(',', ' by ')} {row['both'] / row['sdpa_both']:.2f}"
        for name, row in (
            (name.split("/")[1], row)
            for name, row in found.items()
            if "kernels" in name and name.endswith("/8192")
        )
        if not is_encoding(name) and "both" in row
    ]
    if other:
        lines.append(f"- GPU, training at 8k in other ways, next to SDPA: {', '.join(other)}.")
    again = [
        f"{name}: {seen}" for name, seen in MENDED.items() if f"kernels/{name}/8192" not in found
    ]
    if again and found:
        lines.append(f"- GPU, mended and {NOT_RUN} since: {'; '.join(again)}.")
    host = [
        row["forward_host"]
        for name, row in found.items()
        if name.startswith("decode/")
        and name.endswith("/2048")
        and is_encoding(name)
        and "forward_host" in row
    ]
    if host:
        lines.append(
            f"- GPU, decoding at 2k from Python, where the GPU waits: {min(host):.2f} to "
            f"{max(host):.2f} ms a call."
        )
    for name, row in found.items():
        if name.startswith("rotation/"):
            share = row["half-split"] / row["copy"]
            lines.append(
                f"- GPU, rotating q and k of {int(name.split('/')[1]) // 1024}k tokens moves "
                f"{row['half-split']:,.0f} GB/s, {100 * share:.0f} % of a copy."
            )
    return lines or [f"- GPU: {NOT_RUN}."]


def also(group: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return a line for a group without a table: one number for each run of each case."""
    bases = {case.group: case.baselines for case in CASES}[group]
    lines = []
    for title in dict.fromkeys(row["case"] for row in rows):
        said = [
            f"{row['run']} {row['mib']:.1f}"
            if "mib" in row
            else f"{row['run']} {ratio(row, bases[0])}"
            for row in rows
            if row["case"] == title and ("mib" in row or row["run"] != bases[0])
        ]
        unit = "MiB" if any("mib" in row for row in rows) else f"next to {bases[0]}"
        lines.append(f"{title}, {unit}: {', '.join(said)}")
    return [f"- CPU. {GROUPS[group]} {'; '.join(lines)}."] if lines else []


def table_csv(found: dict[str, Any], gpu: dict[str, dict[str, Any]]) -> str:
    """Return all rows: for each base the ratio with the ends of its 95 % interval, if measured."""
    out = io.StringIO()
    names = ("device", "group", "case", "run", "dtype", "threads", "milliseconds", "mib", "base")
    names += ("ratio", "low", "high")
    writer = csv.DictWriter(out, names, lineterminator="\n", restval="", extrasaction="ignore")
    writer.writeheader()
    for row in found["rows"]:
        given = row | {"device": "CPU"}
        ratios = {base: each for base, each in row.get("ratios", {}).items() if base != row["run"]}
        for base, (middle, low, high) in ratios.items():
            given |= {"base": base, "ratio": middle, "low": low, "high": high}
            writer.writerow(given)
        if not ratios:
            writer.writerow(given)
    for name, row in gpu.items():
        kind, run, length = (*name.split("/"), "")[:3]
        for table_name, (mine, time, base) in ON_GPU.items():
            result = row.get("result", {})
            if kind == mine and {time, base} <= {*result}:
                writer.writerow(
                    {
                        "device": row["device"],
                        "group": table_name,
                        "case": length,
                        "run": run,
                        "dtype": "bfloat16",
                        "milliseconds": result[time],
                        "base": "SDPA",
                        "ratio": round(result[time] / result[base], 4),
                    }
                )
    return out.getvalue()


def gpu_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return the ended rows of the GPU's queue by name; none if it was never run."""
    if not path.exists():
        return {}
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return {line["row"]: line for line in lines if "result" in line}


if __name__ == "__main__":
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    measured, queue = json.loads(results.read_text(encoding="utf-8")), gpu_rows(GPU)
    PAGE.write_text(page(measured, queue), encoding="utf-8")
    CSV.write_text(table_csv(measured, queue), encoding="utf-8")
