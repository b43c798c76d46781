"""The tasks of a study on its page: a matrix of all, then a table and a figure for each."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from posenc.compare.judge.standing import (
    Standing,
    ranks_without_a_task,
    scores_of_task,
    standing_of_task,
    standing_of_tasks,
    standings,
)
from posenc.compare.judge.summary import has_learned
from posenc.compare.page import rows
from posenc.compare.page.task_tables import group_by_task
from posenc.compare.results import Study, TaskSummary
from posenc.report.page.chart import Chart, Data, stacked
from posenc.report.page.drawing import (
    LineStyle,
    curves_by_length,
    figure,
    legend_above,
    line_styles,
    ranked_styles,
)
from posenc.report.page.page import Block, Plot
from posenc.report.page.table import Cell, Heading, Table
from posenc.tasks.known import TASKS, TEXT
from posenc.tasks.scoring import LEARNED

MAX_TONE = 4
"""Colour of the fourth tier and all later ones; 1 is that of the best."""


def task_matrix(study: Study) -> Iterator[Block]:
    """Yield a table with a row per encoding, best first, and a column per task."""
    standings = _standing_by_column(study)
    ranks = ranks_without_a_task(study) if "all" in standings else {}
    summaries = {(row.encoding, row.task): row for row in study.tasks}
    cells = []
    for name in rows.order_by_standings(study, standings.values()):
        row: list = [name]
        for key, standing in standings.items():
            small = ""
            if key == "all" and name in ranks:
                small = _rank_range(*ranks[name])
            elif (name, key) in summaries:
                summary = summaries[name, key]
                small = f"{summary.learned}/{summary.num_seeds}"
            row.append(_mean_cell(standing, name, small))
        of_tasks = [
            summaries[name, task] for task in study.sequence_tasks if (name, task) in summaries
        ]
        by_every_seed = sum(summary.learned == summary.num_seeds for summary in of_tasks)
        row.append(f"{by_every_seed} of {len(study.sequence_tasks)}")
        cells.append(row)
    header = ["encoding", *(_column_heading(key) for key in standings)]
    header.append(Heading("tasks learned", "by every seed"))
    yield Table(
        header, cells, "Best first. In small letters: how many trials learned the task.", cards=True
    )
    yield (
        "A trial has learned its task if it says at least 90 % of the held-out sequences of "
        "the longest trained length without a mistake. The score of a task is the mean over "
        "all longer tests, of every trial, learned or not. The rank is the mean over all "
        "tasks and seeds, among the encodings that run all tasks; trials that did not learn "
        "share the last ranks. In brackets are the best and the worst place if any one task "
        "is left out. Colours are tiers: an encoding of the first is significantly worse "
        "than none, one of the next only than those before it. Where the seeds decide "
        "nothing there is no colour."
    )


def _rank_range(lowest: int, highest: int) -> str:
    """Return a range, or one number if both are the same, in brackets."""
    return f"({lowest})" if lowest == highest else f"({lowest}–{highest})"


def task_plots(study: Study) -> Iterator[Plot]:
    """Yield a figure of each task by length, and one of all trials as dots."""
    styles = ranked_styles(rows.order_by_standings(study, _standing_by_column(study).values()))
    for task, summaries in group_by_task(study.tasks):
        yield Plot(
            _chart_by_length(task, summaries, styles),
            f"The task {task} by length, mean over all seeds.",
            _describe_means(task, summaries),
            _caption_of_task(task, summaries),
            f"task-{task.replace('_', '-')}",
        )
    yield Plot(
        chart_of_every_trial(study),
        (
            "The score of every trial beyond the training length, one dot for each seed and "
            "task; a cross for one that has not learned its task."
        ),
        _describe_every_score(study),
        "Dots of one kind that lie far apart are seeds that disagree.",
        "every-trial",
    )


def chart_of_every_trial(study: Study) -> Chart:
    """Draw the score of every trial: a row per encoding, a marker per task."""
    names = rows.order_by_standings(study, _standing_by_column(study).values())[::-1]  # from below
    passed = {result.config for result in study.finished if has_learned(result)}
    scores = {task: scores_of_task(study, task) for task in study.sequence_tasks}
    dots = []
    for task in study.sequence_tasks:
        for trial in study.of_task(task).trials:
            by_seed = scores[task].get(trial.encoding, {})
            if trial.seed in by_seed:
                score_of_trial = by_seed[trial.seed]
                is_learned = trial in passed
                dots.append((task, score_of_trial, trial.encoding, trial.seed, is_learned))
    score = "score beyond the training length"
    header = ("task", score, "encoding", "seed", "learned")
    columns = zip(*dots, strict=True) if dots else ((),) * len(header)
    data: Data = dict[str, Any](zip(header, columns, strict=True))
    return Chart(data, partial(_draw_trials, names=names, tasks=study.sequence_tasks))


def _draw_trials(data: Data, names: Sequence[str], tasks: Sequence[str]) -> Figure:
    """Draw the table of `chart_of_every_trial`: a row for each of `names`, from below, and in it a
    marker for each trial, of another shape and colour for each task; a cross if it is not
    learned."""
    height = 1.0 + 0.32 * len(names)  # inches: axis and legend, and each row; chosen
    styles = line_styles(tasks)
    _, score, *_ = data
    with figure(score, "", height=height) as (drawn, axes):
        for i, task in enumerate(tasks):
            look = styles[task]
            shift = 0.6 * ((i + 0.5) / len(tasks) - 0.5)  # equal scores hide no other
            for learned_it, marker in ((True, look.marker), (False, "x")):
                points = [
                    (value, names.index(name) - shift)
                    for where, value, name, is_learned in zip(
                        data["task"], data[score], data["encoding"], data["learned"], strict=True
                    )
                    if where == task and is_learned == learned_it
                ]
                x, y = zip(*points, strict=True) if points else ((), ())
                label = task if learned_it else None
                axes.scatter(x, y, s=22, marker=marker, color=look.color, label=label, alpha=0.8)
        axes.scatter((), (), s=22, marker="x", color="gray", label="not learned")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(-0.03, 1.03)  # whole markers at the scores 0 and 1
        legend_above(drawn)
    return drawn


def _standing_by_column(study: Study) -> dict[str, Standing]:
    """Return the standing of each column: all tasks, text at two lengths, each task."""
    columns: dict[str, Standing | None] = {"all": standing_of_tasks(study)}
    text = study.of_task(TEXT)
    if text.trials:
        columns |= {standing.where: standing for standing in standings(text)}
    for task in study.sequence_tasks:
        columns[task] = standing_of_task(study, task)
    return {key: standing for key, standing in columns.items() if standing is not None}


def _mean_cell(standing: Standing, name: str, small: str) -> Cell:
    """Return an encoding's mean, coloured by its tier if differences can be significant; a dash
    where it does not run. small: the second line."""
    if name not in standing.order:
        return Cell("–", small=small)
    decided = standing.pairs.least < math.inf
    tone = min(standing.tier(name), MAX_TONE) if decided else 0
    return Cell(f"{standing.mean(name):.2f}", small=small, tone=tone, strong=tone == 1)


def _column_heading(key: str) -> Heading:
    """Return the heading of a column: its key is "all", a task, or a length of the text in
    words."""
    if key == "all":
        return Heading("all tasks", "mean rank, 1 is best")
    if key not in TASKS:
        return Heading(f"text, {key}", "bits per byte, lower is better")
    return Heading(key, TASKS[key].metric)


def _describe_every_score(study: Study) -> str:
    """Write every score of every seed, the text alternative of the figure of all trials."""
    of_encoding: dict[str, list[str]] = {}
    for task in study.sequence_tasks:
        for name, seeds in scores_of_task(study, task).items():
            values = ", ".join(f"{value:.2f}" for value in seeds.values())
            of_encoding.setdefault(name, []).append(f"{task} {values}")
    lines = ["Scores by encoding and task."]
    for name, of_tasks in of_encoding.items():
        scores = "; ".join(of_tasks)
        lines.append(f"{name}: {scores}.")
    return " ".join(lines)


def _chart_by_length(
    task: str, summaries: Sequence[TaskSummary], styles: dict[str, LineStyle]
) -> Chart:
    """Return the chart of a task: each encoding's mean score by test length."""
    definition = TASKS[task]
    x_label = f"test length, {definition.counts}"
    curves = {
        row.encoding: ([*_means_by_length(row)], [*_means_by_length(row).values()])
        for row in summaries
    }
    tested = sorted({length for lengths, _ in curves.values() for length in lengths})
    look = {"styles": styles, "ticks": tested, "train_length": min(tested)}
    data = stacked(x_label, definition.metric, curves)
    return Chart(data, partial(curves_by_length, **look))


def _means_by_length(row: TaskSummary) -> dict[int, float]:
    """Return the mean scores by length, of the cases without a variant that could run."""
    return {c.length: c.mean for c in row.cases if not c.variant and c.mean is not None}


def _describe_means(task: str, summaries: Sequence[TaskSummary]) -> str:
    """Write the mean scores by length, the text alternative of a task's figure."""
    lines = []
    for row in summaries:
        points = [f"{mean:.2f} at {length}" for length, mean in _means_by_length(row).items()]
        of_encoding = ", ".join(points)
        lines.append(f"{row.encoding}: {of_encoding}")
    metric = TASKS[task].metric.capitalize()
    scores = "; ".join(lines)
    return f"{metric} by length. {scores}."


def _caption_of_task(task: str, summaries: Sequence[TaskSummary]) -> str:
    """Name the encodings that keep the task to the longest length."""
    longest = max(n for row in summaries for n in _means_by_length(row))
    ends = {row.encoding: _means_by_length(row).get(longest) for row in summaries}
    learned_at_end = [name for name, end in ends.items() if end is not None and end >= LEARNED]
    where = f"{longest:,} {TASKS[task].counts}"
    if not learned_at_end:
        return f"None stays above {LEARNED} to {where}."
    names = ", ".join(learned_at_end)
    return f"Above {LEARNED} still at {where}: {names}."
