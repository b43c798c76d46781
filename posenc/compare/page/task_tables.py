"""The tasks of a study as tables for the terminal and for the page."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table as Printed

from posenc.compare.results import CaseSummary, TaskSummary
from posenc.report.page.console import text_table
from posenc.report.page.table import Cell, Heading, Table
from posenc.sentence import join_names
from posenc.tasks.known import TASKS
from posenc.tasks.scoring import LEARNED

Rows = Sequence[TaskSummary]


def group_by_task(rows: Rows) -> Iterator[tuple[str, list[TaskSummary]]]:
    """Yield each task with its rows."""
    for task, group in groupby(rows, key=lambda row: row.task):
        yield task, list(group)


def task_tables(rows: Rows) -> Iterator[Printed]:
    """Yield a table per task: how many seeds learned it, and its metric in every case."""
    for task, group in group_by_task(rows):
        definition = TASKS[task]
        named = "encoding"
        header = [named, "learned", *map(_case_heading, group[0].cases)]
        lines = [
            [r.encoding, f"{r.learned}/{r.num_seeds}", *map(_score_text, r.cases)] for r in group
        ]
        title = f"{task}: {definition.metric} by {definition.counts} (higher is better)"
        yield text_table(header, lines, named=named, title=title, title_justify="left")


def task_notes(rows: Rows) -> Iterator[str]:
    """Yield on which tasks encodings cannot run at some lengths, with the first reason."""
    reasons: dict[str, dict[str, str]] = {}
    for row in rows:
        for case in row.cases:
            if case.cannot:
                reasons.setdefault(row.encoding, {}).setdefault(row.task, case.cannot)
    for name, tasks in reasons.items():
        (task, why), *_ = tasks.items()
        note = f"{name} on {join_names([*tasks])}: cannot run at some lengths: {why}"
        if len(tasks) > 1:
            note = f"{note} (on {task}; see the report for the others)"
        yield note


def task_page_table(task: str, rows: Rows) -> Table:
    """Return the table of one task, with every seed behind each mean."""
    definition = TASKS[task]
    metric = definition.metric.capitalize()
    caption = (
        f"The task {task}: {definition.title}. {metric}, the mean over all seeds, at the "
        "longest length of training first; in brackets every seed."
    )
    header = [
        "encoding",
        Heading("learned", f"exact match of {LEARNED} in distribution"),
        *(Heading(_case_heading(case), definition.counts) for case in rows[0].cases),
        Heading("parameters", "of the whole model"),
    ]
    cells = []
    for row in rows:
        name = row.encoding
        learned = f"{row.learned}/{row.num_seeds}"
        cells.append(
            [name, learned, *(_score_cell(row, case) for case in row.cases), row.parameters]
        )
    return Table(header, cells, caption, cards=True)


def _case_heading(case: CaseSummary) -> str:
    """Return the heading of a case: its length, and its variant if it is one."""
    if not case.variant:
        return f"{case.length:,}"
    return f"{case.length:,}, {case.variant}"


def _score_text(case: CaseSummary) -> str:
    """Return the mean score of a case, or that it cannot run, as text."""
    return "cannot" if case.mean is None else f"{case.mean:.3f}"


def _score_cell(row: TaskSummary, case: CaseSummary) -> Cell:
    """Return the mean score of a case with that of every seed, or a note why there is none."""
    if case.cannot:
        return Cell("cannot", note=f"{row.encoding}: {case.cannot}")
    seeds = ", ".join(f"{value:.2f}" for value in case.seeds)
    return Cell(f"{_score_text(case)} ({seeds})")
