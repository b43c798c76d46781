"""The tasks of a study as tables for the terminal and for the page."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table as Printed

from posenc.compare.results import CaseSummary, TaskSummary
from posenc.compare.trial.evaluate import CANNOT
from posenc.report.page.console import text_table
from posenc.report.page.table import Cell, Heading, Table
from posenc.sentence import join_names, phrase, translate_stored_text
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
        named = phrase("encoding")
        header = [named, phrase("learned"), *map(_case_heading, group[0].cases)]
        lines = [
            [r.encoding, f"{r.learned}/{r.num_seeds}", *map(_score_text, r.cases)] for r in group
        ]
        words = {"metric": phrase(definition.metric), "counts": phrase(definition.counts)}
        title = phrase("title of a task", task=task, **words)
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
        reason = translate_stored_text(why, CANNOT)
        note = phrase(
            "Note: cannot run tasks", name=name, tasks=join_names([*tasks]), reason=reason
        )
        if len(tasks) > 1:
            note = phrase("{said} (on {task}; see the report for the others)", said=note, task=task)
        yield note


def task_page_table(task: str, rows: Rows) -> Table:
    """Return the table of one task, with every seed behind each mean."""
    definition = TASKS[task]
    in_distribution = "exact match of {least} in distribution"
    metric = phrase(definition.metric).capitalize()
    caption = phrase("caption of a task", task=task, title=phrase(definition.title), metric=metric)
    header = [
        phrase("encoding"),
        Heading(phrase("learned"), phrase(in_distribution, least=LEARNED)),
        *(Heading(_case_heading(case), phrase(definition.counts)) for case in rows[0].cases),
        Heading(phrase("parameters"), phrase("of the whole model")),
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
    return phrase("{length:,}, {variant}", length=case.length, variant=phrase(case.variant))


def _score_text(case: CaseSummary) -> str:
    """Return the mean score of a case, or that it cannot run, as text."""
    return phrase("cannot") if case.mean is None else f"{case.mean:.3f}"


def _score_cell(row: TaskSummary, case: CaseSummary) -> Cell:
    """Return the mean score of a case with that of every seed, or a note why there is none."""
    if case.cannot:
        return Cell(
            phrase("cannot"), note=f"{row.encoding}: {translate_stored_text(case.cannot, CANNOT)}"
        )
    seeds = ", ".join(f"{value:.2f}" for value in case.seeds)
    return Cell(f"{_score_text(case)} ({seeds})")
