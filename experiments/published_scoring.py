"""Does the agreement with published tables of tasks hang on how the trials are scored?

python experiments/published_scoring.py

Reads the published trials of the leaderboard and scores those that learned their task in several
ways: by exact match or by the share of right symbols, with the end symbol or cut before it, over
all longer tests or the nearest ones alone. results/ablations/published_scoring.csv has a row for
each table and way: in how many of the pairs that the publication tells apart the order is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from refused import check_file, refusing
from tables import write_table

from posenc.compare.judge.published import TASK_TABLES, read_tables, told_in_task
from posenc.compare.judge.summary import learned
from posenc.compare.page.tables import CASE_MEASURES
from posenc.compare.reports.board import PUBLISHED, ROWS
from posenc.compare.reports.leaderboard import read_rows
from posenc.compare.results import TrialResult
from posenc.statistics.agreement import sign_agreement

ROOT = Path(__file__).parents[1]
HEADER = ("table", "task", "measure", "lengths", "agreeing", "pairs", "encodings", "means")


def scores(results: list[TrialResult], measure: str, lengths: list[int]) -> dict[str, float]:
    """The mean of each encoding over its trials; lower is better, as in the tables of losses."""
    found: dict[str, list[float]] = {}
    for result in results:
        each = [getattr(c, measure) for c in result.by_case if c.length in lengths]
        if None not in each:
            found.setdefault(result.config.encoding, []).append(fmean(each))
    return {name: -fmean(each) for name, each in found.items()}


def rows_of(results: list[TrialResult]) -> Iterator[tuple[object, ...]]:
    for table in read_tables(TASK_TABLES):
        trials = [
            result
            for result in results
            if result.config.task == table["task"]
            and result.config.encoding in table["seeds"]
            and learned(result)
        ]
        if len({result.config.encoding for result in trials}) < 2:
            continue
        longer = [case.length for case in trials[0].by_case[1:]]
        for measure in CASE_MEASURES:
            for last in range(2, len(longer) + 1):
                ours = scores(trials, measure, longer[:last])
                agreeing, pairs = sign_agreement(ours, told_in_task(table, list(ours)))
                means = " ".join(f"{-value:.3f}" for value in ours.values())
                tested = " ".join(map(str, longer[:last]))
                names = " ".join(ours)
                yield table["name"], table["task"], measure, tested, agreeing, pairs, names, means


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROOT / PUBLISHED / ROWS)
    parser.add_argument(
        "--table", type=Path, default=ROOT / "results/ablations/published_scoring.csv"
    )
    given = parser.parse_args()
    with refusing(parser):
        check_file("--table", given.table)
        rows = list(rows_of([row.result for row in read_rows(given.rows)]))
        if not rows:
            raise ValueError(f"--rows: {given.rows} has no trials of a task that a table is of.")
        write_table(given.table, HEADER, rows)


if __name__ == "__main__":
    main()
