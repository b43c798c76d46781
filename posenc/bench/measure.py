"""Interleaved timing, peak memory, and rows that say what was measured where."""

from __future__ import annotations

import csv
import ctypes
import datetime
import gc
import io
import itertools
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from posenc.report.atomic import write_atomically
from posenc.report.machine import processor

Case = Callable[[], Any]


def interleaved(cases: Mapping[str, Case], repeats: int) -> dict[str, list[float]]:
    """Seconds of each case, round by round. Every round runs all cases in turn, so a busy machine
    slows all of them; a first round is not counted.

    On one thread of the CPU this is the thread's own time, without what other processes take; with
    several threads, and on a GPU, it is what the clock on the wall says.
    """
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(repeats):
        for name, case in cases.items():
            seconds[name].append(_time(case))
    return seconds


def _time(case: Case) -> float:
    clock = time.thread_time if clock_name() == "thread" else time.perf_counter
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = clock()
    case()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - start


def clock_name() -> str:
    """Which time is measured: "thread" or "wall"."""
    return "wall" if torch.cuda.is_available() or torch.get_num_threads() > 1 else "thread"


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, by the nearest rank."""
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


def ratio_interval(values: Sequence[float], floor: Sequence[float]) -> tuple[float, float]:
    """Where the median of the ratios within a round lies with at least 95 % confidence, whatever
    their distribution: two of the ratios themselves, by their ranks. Below six rounds no ranks do,
    and all ratios lie between the two."""
    ratios = sorted(_ratios(values, floor))
    count = len(ratios)
    chances = itertools.accumulate(math.comb(count, k) / 2**count for k in range(count))
    outside = sum(1 for chance in chances if chance <= 0.025)
    return ratios[max(outside - 1, 0)], ratios[count - 1 - max(outside - 1, 0)]


def peak_bytes(case: Case) -> int | None:
    """How far `case` raises the memory of this process, its result included; None if the system
    does not say."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        case()
        return torch.cuda.max_memory_allocated() - before
    reset = Path("/proc/self/clear_refs")
    if not os.access(reset, os.W_OK):
        return None
    # Return freed memory to the system first, or the case reuses it and seems to need none.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    reset.write_text("5", encoding="ascii")
    before = _status("VmRSS")
    case()
    return _status("VmHWM") - before


def live_bytes(case: Case) -> int:
    """How far `case` raises the memory that torch's allocator has handed out, its result included.
    Memory that the allocator or the system keeps for later is not counted."""
    if torch.cuda.is_available():
        peak = peak_bytes(case)
        assert peak is not None
        return peak
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        case()
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    sizes = (event.nbytes() for event in changes)  # type: ignore[attr-defined]
    return max(itertools.accumulate(sizes, initial=0))


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def machine_columns() -> dict[str, str]:
    """The columns that every row carries."""
    gpu = torch.cuda.is_available()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if gpu else processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _ratios(values: Sequence[float], floor: Sequence[float]) -> list[float]:
    """Round by round: what disturbs a round disturbs both."""
    return [a / b for a, b in zip(values, floor, strict=True)]


def measured_rows(
    question: str, columns: Mapping[str, Any], cases: Mapping[str, Case], floor: str, repeats: int
) -> list[dict[str, Any]]:
    """One row per case with its peak of memory and its time, shown as soon as it is known."""
    peaks = {name: peak_bytes(case) for name, case in cases.items()}
    rows = timing_rows(question, columns, interleaved(cases, repeats), floor, peaks)
    show_rows(rows)
    return rows


def timing_rows(
    question: str,
    shape: Mapping[str, Any],
    seconds: Mapping[str, Sequence[float]],
    floor: str,
    peaks: Mapping[str, int | None],
) -> list[dict[str, Any]]:
    """One row per case; `ratio` is the median of its ratios to `floor` within a round, `ratio_low`
    and `ratio_high` are its `ratio_interval`."""
    base = seconds[floor]

    def compared(values: Sequence[float]) -> dict[str, str]:
        names = ("ratio", "ratio_low", "ratio_high")
        if not min(base) > 0:  # a clock that ticks rarely shows 0 for the smallest sizes
            return dict.fromkeys(names, "")
        found = quantile(_ratios(values, base), 0.5), *ratio_interval(values, base)
        return {name: f"{ratio:.3f}" for name, ratio in zip(names, found, strict=True)}

    return [
        {
            "question": question,
            **shape,
            "case": name,
            "p20_ms": f"{1e3 * quantile(values, 0.2):.3f}",
            "p50_ms": f"{1e3 * quantile(values, 0.5):.3f}",
            "p80_ms": f"{1e3 * quantile(values, 0.8):.3f}",
            **compared(values),
            "floor": floor,
            "extra_mib": "" if peaks.get(name) is None else f"{peaks[name] / 2**20:.1f}",  # type: ignore[operator]
            "repeats": len(values),
            "clock": clock_name(),
            **machine_columns(),
        }
        for name, values in seconds.items()
    ]


def show_rows(found: Iterable[Mapping[str, Any]]) -> None:
    """One line per row, on stderr."""
    for row in found:
        shape = " ".join(str(row[name]) for name in ("n", "dtype", "pass") if name in row)
        if "p50_ms" not in row:
            print(
                f"{row['question']:<10} {shape:<22} {row['case']:<34} "
                f"{row['beyond_output_mib']:>10} MiB beyond the output, exponent {row['exponent']}",
                file=sys.stderr,
            )
            continue
        extra = f"{row['extra_mib']:>9} MiB" if row["extra_mib"] else ""
        ends = f"({row['ratio_low']} to {row['ratio_high']})"
        print(
            f"{row['question']:<10} {shape:<22} {row['case']:<34} {row['p50_ms']:>10} ms "
            f"{row['ratio']:>7} {ends} x {row['floor']}{extra}",
            file=sys.stderr,
        )


def save_rows(found: list[dict[str, Any]], path: Path) -> None:
    """Write the rows as CSV, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = list(dict.fromkeys(name for row in found for name in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fields, restval="")
    writer.writeheader()
    writer.writerows(found)
    write_atomically(path, text.getvalue())
