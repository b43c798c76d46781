"""Build the report of measurements: what each run costs, and what a device computes wrongly."""

from collections.abc import Iterable, Sequence
from typing import Any

from posenc.bench.cases import GROUPS
from posenc.report.report import (
    Heading,
    Number,
    Report,
    Section,
    Table,
    Value,
    section_on_training,
)

NEXT_COMPARED = ("rope", "alibi", "t5")
"""Encodings of the command that comes next: what they cost says not what they learn."""
Row = dict[str, Any]
"""A measured run of a case, a check of an encoding on a device, or what was left out and why: a
line of the file that --out writes."""


def report_of(machine: dict[str, Any], rows: Sequence[Row]) -> Report:
    """Return the report: the checks of a device if there are any, and what each run costs."""
    verdicts = [row["ok"] for row in rows if "ok" in row]
    measured_cases = {(row["group"], row["case"]) for row in rows if "run" in row}
    headline = f"{_count_in_words(len(measured_cases), 'case')} measured on {machine['device']}."
    if verdicts:
        num_wrong = verdicts.count(False)
        headline = f"{_count_in_words(len(verdicts), 'check')}, {num_wrong} wrong; {headline}"
    return Report(
        "What position encodings cost",
        headline,
        {"machine": machine, "rows": rows},
        [
            *_sections_of_wrong_results(rows),
            *measured_sections(rows),
            *_sections_of_left_out(rows),
            section_on_training(NEXT_COMPARED),
        ],
    )


def _count_in_words(number: int, noun: str) -> str:
    """Return a number with its noun: (1, "case") -> "1 case", (12, "case") -> "12 cases"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _sections_of_wrong_results(rows: Sequence[Row]) -> list[Section]:
    """Return the section about wrong results, in a list; an empty list if there are none."""
    wrong_rows = [_wrong_cells(row) for row in rows if row.get("ok") is False]
    if not wrong_rows:
        return []
    header = ["of", "tokens", "dtype", "implementation", "error"]
    return [Section("Wrong results", [Table(header, wrong_rows, "Wrong results")])]


def _sections_of_left_out(rows: Sequence[Row]) -> list[Section]:
    """Return the section about what was left out, with a line for each reason, in a list. Return an
    empty list if nothing was."""
    names_by_reason: dict[str, list[str]] = {}
    for row in rows:
        if "left_out" in row:
            names_by_reason.setdefault(row["left_out"], []).append(_row_name(row))
    if not names_by_reason:
        return []
    table_rows = [
        [", ".join(dict.fromkeys(names)), len(names), reason]
        for reason, names in names_by_reason.items()
    ]
    return [Section("Left out", [Table(["of", "results", "why"], table_rows, "Left out")])]


def _row_name(row: Row) -> str:
    """Return the name of the encoding that a row checks. For a measured row return the group and
    the title of its case."""
    return row["check"] if "check" in row else f"{row['group']} {row['case']}"


def _wrong_cells(row: Row) -> list[Value]:
    """Return the cells of a wrong result: what was run, tokens, dtype, implementation, and the
    error, which is a number, or the message that was raised. None where the row has no such
    value."""
    num_tokens = row.get("length", row.get("q_len"))
    return [_row_name(row), num_tokens, row.get("dtype"), row.get("impl"), row.get("error")]


def measured_sections(rows: Iterable[Row]) -> list[Section]:
    """Return a section for each group, with a table for each case and number of threads."""
    rows_by_table: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if "run" in row:
            key = (row["group"], row["case"], row["threads"])
            rows_by_table.setdefault(key, []).append(row)
    tables_by_group: dict[str, list[Table]] = {}
    for (group, case, num_threads), rows_of_table in rows_by_table.items():
        caption = f"{group} {case}, {_count_in_words(num_threads, 'thread')}"
        table = _table_of_runs(rows_of_table, caption)
        tables_by_group.setdefault(group, []).append(table)
    return [Section(GROUPS[group], tables) for group, tables in tables_by_group.items()]


def _table_of_runs(rows: Sequence[Row], caption: str) -> Table:
    """Return the table of a case: for each run its memory, or its time and its ratios."""
    if "mib" in rows[0]:  # then all rows of the case have it
        memory_rows = [
            [row["run"], Number(row["mib"], format_spec=".1f", unit=" MiB")] for row in rows
        ]
        return Table(["run", "memory"], memory_rows, caption)
    baselines = [*rows[0]["ratios"]]
    header: list[str | Heading] = ["run", "median"]
    header += [Heading(f"ratio to {baseline}", "with its 95 % interval") for baseline in baselines]
    has_rates = "gb_per_second" in rows[0]
    has_compiled = "compiled" in rows[0]
    header += ["memory moved"] if has_rates else []
    header += ["compiled again"] if has_compiled else []
    table_rows: list[list[Value]] = []
    for row in rows:
        cells: list[Value] = [
            row["run"],
            Number(row["milliseconds"], format_spec=".3f", unit=" ms"),
        ]
        cells += [_ratio_to_baseline(row, baseline) for baseline in baselines]
        if has_rates:
            cells.append(Number(row["gb_per_second"], format_spec=".3f", unit=" GB/s"))
        if has_compiled:
            cells.append("yes" if row["compiled"] else "no")
        table_rows.append(cells)
    return Table(header, table_rows, caption)


def _ratio_to_baseline(row: Row, baseline: str) -> Number | None:
    """Return a run's ratio to a baseline; None for the baseline itself, or without a time."""
    ratio = row["ratios"][baseline]
    return None if ratio is None or baseline == row["run"] else Number(*ratio, format_spec=".2f")
