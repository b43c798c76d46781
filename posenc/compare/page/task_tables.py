"""The tasks of a study as tables for the terminal and for the page."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table as Printed

from posenc.compare.results import CaseSummary, TaskSummary
from posenc.report.page.console import text_table
from posenc.report.page.table import Cell, Heading, Table
from posenc.tasks.known import TASKS
from posenc.tasks.scoring import LEARNED
from posenc.tasks.task import Case

Rows = Sequence[TaskSummary]


def by_task(rows: Rows) -> Iterator[tuple[str, list[TaskSummary]]]:
    """Yield each task with its rows."""
    for task, group in groupby(rows, key=lambda row: row.task):
        yield task, list(group)


def task_tables(rows: Rows) -> Iterator[Printed]:
    """Yield a table per task: how many seeds learned it, and its metric in every case."""
    for task, group in by_task(rows):
        made = TASKS[task]
        header = ["encoding", "learned", *map(_heading, group[0].cases)]
        lines = (
            [row.encoding, f"{row.learned}/{row.num_seeds}", *map(_text, row.cases)]
            for row in group
        )
        title = f"{task}: {made.metric} by {made.counts} (higher is better)"
        yield text_table(header, lines, named="encoding", title=title, title_justify="left")


def task_notes(rows: Rows) -> Iterator[str]:
    """Yield why encodings cannot run at some lengths."""
    for row in rows:
        for reason in dict.fromkeys(case.cannot for case in row.cases if case.cannot):
            yield f"{row.encoding} on {row.task}: cannot run at some lengths: {reason}"


def page_table(task: str, rows: Rows) -> Table:
    """Return the table of one task, with every seed behind each mean."""
    made = TASKS[task]
    return Table(
        [
            "encoding",
            Heading("learned", f"exact match of {LEARNED} in distribution"),
            *(Heading(_heading(case), made.counts) for case in rows[0].cases),
            Heading("parameters", "of the whole model"),
        ],
        [
            [
                row.encoding,
                f"{row.learned}/{row.num_seeds}",
                *(_cell(row, case) for case in row.cases),
                row.parameters,
            ]
            for row in rows
        ],
        f"The task {task}: {made.title}. {made.metric.capitalize()}, the mean over all seeds, at "
        "the longest length of training first; in brackets every seed.",
    )


def _heading(case: CaseSummary) -> str:
    return str(Case(case.length, case.variant))


def _text(case: CaseSummary) -> str:
    return "cannot" if case.mean is None else f"{case.mean:.3f}"


def _cell(row: TaskSummary, case: CaseSummary) -> Cell:
    if case.cannot:
        return Cell("cannot", note=f"{row.encoding}: {case.cannot}")
    seeds = ", ".join(f"{value:.2f}" for value in case.seeds)
    return Cell(f"{_text(case)} ({seeds})")
