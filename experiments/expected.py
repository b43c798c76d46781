"""What the published rows say of each outcome that was expected, as differences with intervals.

python experiments/expected.py

results/ablations/expected.csv has a row for each comparison of COMPARED: the score of the first
minus that of the second, an encoding at a test, over the seeds in which both learned the task; ±
is half of Student's 95 % interval of paired seeds, which takes seeds for one kind and, of a task,
describes. Higher is better but for text, whose scores are bits per byte.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from refused import check_file, refusing
from tables import half_95, write_table

from posenc.compare.judge.summary import learned, metric_of
from posenc.compare.reports.board import PUBLISHED, ROWS
from posenc.compare.reports.leaderboard import read_rows
from posenc.compare.results import TrialResult
from posenc.compare.trial.evaluate import SEQUENCES
from posenc.tasks.known import TEXT

ROOT = Path(__file__).parents[1]
RESOLUTION = 1 / SEQUENCES
TEXT_ROWS = "code.jsonl"
HEADER = ("task", "first", "minus", "difference", "half_95", "seeds", "by_seed")
BEYOND, SPARSE = "beyond", "98 % ignored"
"""Over all tests but that of the training length; with 98 % of the instructions to be ignored."""


class Side(NamedTuple):
    """An encoding at a test: BEYOND, a length, or a variant of the task."""

    encoding: str
    test: int | str

    def __str__(self) -> str:
        return f"{self.encoding}, {self.test}"


Pair = tuple[Side, Side]


def _each(names: str, other: str, test: int | str) -> list[Pair]:
    return [(Side(name, test), Side(other, test)) for name in names.split()]


def _falls(names: str, near: int, far: int) -> list[Pair]:
    return [(Side(name, near), Side(name, far)) for name in names.split()]


COMPARED: dict[str, list[Pair]] = {
    TEXT: [
        *_each("t5 kerple", "alibi", 1024),
        *_each("rope", "alibi", 1024),
        *_each("sinusoidal", "rope", 1024),
        *_each("nope", "sinusoidal", 128),
    ],
    "copy": [*_each("alibi", "nope", BEYOND), *_each("dape kerple shaw", "nope", BEYOND)],
    "copy_512": [
        *_each("nope", "t5", BEYOND),
        *_each("t5", "alibi", BEYOND),
        *_each("alibi", "rope", BEYOND),
        *_each("dape fire shaw", "nope", BEYOND),
    ],
    "reverse": [
        *_each("nope t5", "alibi", BEYOND),
        *_each("nope", "t5", BEYOND),
        *_each("nope t5 alibi fire", "rope", BEYOND),
        *_each("fire", "nope", BEYOND),
    ],
    "recall": _falls("rope alibi kerple fire shaw cope dape", 16, 1024),
    "flip_flop": [*_each("cope dape shaw", "fire", SPARSE), *_each("rope", "t5", 64)],
    "offset": [*_falls("t5 shaw rope cope dape", 64, 128), *_falls("shaw rope dape", 64, 512)],
}


def score(result: TrialResult, test: int | str) -> float:
    """Of a trial at a test. Raises: ValueError where it has none such, or cannot run it."""
    task = result.config.task
    if task == TEXT:
        values = [s.bits_per_byte for s in result.by_length if s.length == test]
    elif test == BEYOND:
        values = [metric_of(task, each) for each in result.by_case[1:]]
    else:
        places = [(each, each.variant or each.length) for each in result.by_case]
        values = [metric_of(task, each) for each, place in places if place == test]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        raise ValueError(f"--rows: {result.config.folder} has no score at {test}.")
    return fmean(known)


def compared(results: Sequence[TrialResult], task: str, pair: Pair) -> tuple[object, ...]:
    """A row of the table. Raises: ValueError where no seed has both."""
    found: list[dict[int, float]] = [
        {
            result.config.seed: score(result, side.test)
            for result in results
            if result.config.task == task
            and result.config.encoding == side.encoding
            and (task == TEXT or learned(result))
        }
        for side in pair
    ]
    first, minus = found
    seeds = sorted(first.keys() & minus.keys())
    if not seeds:
        raise ValueError(f"--rows: no seed of {task} has both {pair[0]} and {pair[1]}.")
    resolution = 0.0 if task == TEXT else RESOLUTION
    gaps = [first[s] - minus[s] for s in seeds]
    width = half_95(gaps, resolution)
    half = f"{width:.3f}" if width < math.inf else "unknown"
    each = " ".join(f"{gap:+.3f}" for gap in gaps)
    return task, *pair, f"{fmean(gaps):+.3f}", half, len(gaps), each


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    rows = [ROOT / PUBLISHED / name for name in (TEXT_ROWS, ROWS)]
    parser.add_argument("--rows", type=Path, nargs="+", default=rows)
    parser.add_argument("--table", type=Path, default=ROOT / "results/ablations/expected.csv")
    given = parser.parse_args()
    with refusing(parser):
        check_file("--table", given.table)
        results = [row.result for file in given.rows for row in read_rows(file)]
        rows = [compared(results, task, pair) for task in COMPARED for pair in COMPARED[task]]
        write_table(given.table, HEADER, rows)


if __name__ == "__main__":
    main()
