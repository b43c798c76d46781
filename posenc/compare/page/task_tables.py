"""The tables of tasks: a matrix of all, and the scores of each by length."""

import math
from collections.abc import Sequence

from posenc.compare.judge.near_far import standing_by_column
from posenc.compare.judge.standing import Standing, order_by_standings, ranks_without_a_task
from posenc.compare.page import figures
from posenc.compare.results import CaseSummary, Study, TaskSummary
from posenc.compare.trial.config import TrialConfig
from posenc.report.report import Cell, Heading, Number, Table, Value
from posenc.tasks.registry import TASKS
from posenc.tasks.scoring import LEAST_LEARNED_EXACT_MATCH

MAX_TONE = 4
"""Colour of the fourth tier and all later ones; 1 is that of the best."""
HOW_TO_READ_TASKS = (
    "In small letters: how many trials learned the task. A trial has learned its task if it says "
    "at least 90 % of the held-out sequences of the longest trained length without a mistake. The "
    "score of a task is the mean over all longer tests, of every trial, learned or not. The rank "
    "is the mean over all tasks and seeds, among the encodings that run all tasks; trials that did "
    "not learn share the last ranks. In brackets are the best and the worst place if any one task "
    "is left out. Colours are tiers: an encoding of the first is significantly worse than none, "
    "one of the next only than those before it. Where the seeds decide nothing there is no colour."
)


def matrix_of_tasks(study: Study) -> Table:
    """Return a table with a row per encoding, best first, and a column per task."""
    columns = standing_by_column(study)
    ranks = ranks_without_a_task(study) if "all" in columns else {}
    summaries = {(row.encoding, row.task): row for row in study.tasks}
    rows = []
    for name in order_by_standings(study, columns.values()):
        row: list[Value] = [name]
        for key, standing in columns.items():
            small = ""
            if key == "all" and name in ranks:
                small = _rank_range(*ranks[name])
            elif (name, key) in summaries:
                small = _learned_text(summaries[name, key])
            row.append(_mean_cell(standing, name, small))
        of_name = [summary for summary in study.tasks if summary.encoding == name]
        by_every_seed = sum(summary.learned == summary.num_seeds for summary in of_name)
        row.append(f"{by_every_seed} of {len(study.sequence_tasks)}")
        rows.append(row)
    header = ["encoding", *map(_heading_of_column, columns)]
    header.append(Heading("tasks learned", "by every seed"))
    return Table(header, rows, "Best first.", cards=True, name="tasks")


def _heading_of_column(key: str) -> Heading:
    """Return the heading of a column: its key is "all", a task, or a length of the text in
    words."""
    if key == "all":
        return Heading("all tasks", "mean rank, 1 is best")
    if key not in TASKS:
        return Heading(f"text, {key}", "bits per byte, lower is better")
    return Heading(key, TASKS[key].metric)


def _mean_cell(standing: Standing, name: str, small: str) -> Cell:
    """Return an encoding's mean, coloured by its tier if differences can be significant; a dash
    where it does not run. small: the second line."""
    if name not in standing.order:
        return Cell("–", second_line=small)
    is_decided = standing.pairs.least_significant_gap < math.inf
    tone = min(standing.tier(name), MAX_TONE) if is_decided else 0
    mean = Number(standing.mean(name), form=".2f")
    return Cell(mean, second_line=small, tone=tone, strong=tone == 1)


def _rank_range(lowest: int, highest: int) -> str:
    """Return a range, or one number if both are the same, in brackets."""
    return f"({lowest})" if lowest == highest else f"({lowest}–{highest})"


def _learned_text(summary: TaskSummary) -> str:
    """Return how many trials of an encoding learned the task: `2/3`."""
    return f"{summary.learned}/{summary.num_seeds}"


def task_table(task: str, summaries: Sequence[TaskSummary], trial: TrialConfig) -> Table:
    """Return the table of one task, with every seed in small letters; below are the levels of
    policies that answer without doing the task."""
    definition = TASKS[task]
    header = [
        "encoding",
        Heading("learned", f"exact match of {LEAST_LEARNED_EXACT_MATCH} in distribution"),
        *(Heading(_case_name(case), definition.length_unit) for case in summaries[0].cases),
        Heading("parameters", "of the whole model"),
    ]
    rows = []
    for row in summaries:
        scores = [_score_cell(row, case) for case in row.cases]
        rows.append([row.encoding, _learned_text(row), *scores, row.parameters])
    for policy, levels in figures.levels_of_policies(task, summaries[0].cases, trial).items():
        rows.append([policy, "no model", *(Number(level, form=".3f") for level in levels), None])
    caption = (
        f"The task {task}: {definition.title}. {definition.metric.capitalize()} by "
        f"{definition.length_unit}, the mean over all seeds, higher is better; the longest length "
        "of training first."
    )
    return Table(header, rows, caption, cards=True, name=f"scores-{task.replace('_', '-')}")


def _case_name(case: CaseSummary) -> str:
    """Return the name of a case: its length, and its variant if it is one."""
    return f"{case.length:,}, {case.variant}" if case.variant else f"{case.length:,}"


def _score_cell(row: TaskSummary, case: CaseSummary) -> Cell:
    """Return the mean score of a case with that of every seed, or a note why there is none."""
    if case.mean is None:
        return Cell("cannot", note=f"{row.encoding}: {case.cannot}")
    seeds = ", ".join(f"{value:.2f}" for value in case.seeds)
    return Cell(Number(case.mean, form=".3f"), second_line=seeds)
