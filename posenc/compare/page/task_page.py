"""The tasks of a study on its page: a table and a figure for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure

from posenc.compare.judge import like_tasks, pooled
from posenc.compare.judge.summary import LEARNED
from posenc.compare.page.task_tables import by_task, page_table
from posenc.compare.results import Study, TaskSummary
from posenc.report.page.drawing import (
    LineStyle,
    figure,
    legend_above,
    length_axis,
    line_styles,
)
from posenc.report.page.page import Plot
from posenc.report.page.table import Table
from posenc.statistics.scores import Scores
from posenc.tasks.known import TASKS


def tasks(study: Study) -> Iterator[str | Table | Plot]:
    """What the tasks are scored by, then for each its table, and its figure where somebody learned
    it; and last all of them together."""
    yield (
        "Sequences with known answers, short in training and longer in the tests. A trial has "
        f"learned its task if it says at least {LEARNED:.0%} of the held-out sequences of the "
        "longest trained length without a mistake; one that has not is shown and counted, and "
        "kept out of the means, because how it does beyond would say nothing about its encoding. "
        "Nothing is chosen by longer sequences."
    )
    styles = line_styles(study.encodings)
    for task, rows in by_task(study.tasks):
        yield page_table(task, rows)
        drawn = [row for row in rows if row.learned]
        if drawn:
            yield Plot(
                _by_length(task, drawn, styles),
                f"The task {task} by length, for those who learned it.",
                _described(task, drawn),
                _seen(task, drawn),
                f"task-{task.replace('_', '-')}",
            )
    found = pooled.pooled_rows(study)
    if found:
        yield Table(found[0], found[1:], f"{pooled.TITLE}.")
        yield pooled.MEANING
        likely = like_tasks.like_task_rows(study, pooled.counted_names(found))
        if likely:
            yield Table(likely[0], likely[1:], f"{like_tasks.TITLE}.")
            yield like_tasks.MEANING
        yield Plot(
            every_trial(study, [row[0] for row in found[1:]]),
            "The score of every trial, one dot for each seed and task; a cross for one that has "
            "not learned its task.",
            _every_score(pooled.scores_of(study)),
            "Dots of one kind that lie far apart are seeds that disagree.",
            "every-trial",
        )


def every_trial(study: Study, encodings: Sequence[str]) -> Figure:
    """The score of every trial: a row for each encoding, a marker for each task."""
    scores, names = pooled.scores_of(study), encodings[::-1]
    styles = line_styles(scores.tasks)
    height = 1.0 + 0.28 * len(names)
    with figure("score beyond the training length", "", height=height) as (drawn, axes):
        for index, task in enumerate(scores.tasks):
            place, counted = styles[task], scores.counted()[:, index]
            for learned_it, marker in ((True, place.marker), (False, "x")):
                points = [
                    (scores.values[e, index, s], names.index(name))
                    for e, name in enumerate(scores.encodings)
                    for s in np.flatnonzero(counted[e] == learned_it)
                    if not np.isnan(scores.values[e, index, s])
                ]
                x, y = zip(*points, strict=True) if points else ((), ())
                label = task if learned_it else None
                axes.scatter(x, y, s=22, marker=marker, color=place.color, label=label, alpha=0.8)
        if np.any(scores.not_learned):
            axes.scatter((), (), s=22, marker="x", color="gray", label="not learned")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(-0.03, 1.03)
        legend_above(drawn)
    return drawn


def _every_score(scores: Scores) -> str:
    lines = []
    for name, tasks in zip(scores.encodings, scores.values, strict=True):
        cells = [
            f"{task} {', '.join(f'{value:.2f}' for value in seeds if not np.isnan(value))}"
            for task, seeds in zip(scores.tasks, tasks, strict=True)
            if not np.isnan(seeds).all()
        ]
        lines.append(f"{name}: {'; '.join(cells) or 'none'}")
    return f"Scores by encoding and task. {'. '.join(lines)}."


def _by_length(task: str, rows: list[TaskSummary], styles: dict[str, LineStyle]) -> Figure:
    made = TASKS[task]
    with figure(f"test length, {made.counts}", made.metric) as (drawn, axes):
        shown: set[int] = set()
        for row in rows:
            points = _points(row)
            shown.update(points)
            style = styles[row.encoding].points()
            axes.plot(list(points), list(points.values()), label=row.encoding, **style)
        length_axis(axes, sorted(shown), min(shown))
        legend_above(drawn)
    return drawn


def _points(row: TaskSummary) -> dict[int, float]:
    return {c.length: c.mean for c in row.cases if not c.variant and c.mean is not None}


def _described(task: str, rows: list[TaskSummary]) -> str:
    lines = [
        f"{row.encoding}: " + ", ".join(f"{mean:.2f} at {n}" for n, mean in _points(row).items())
        for row in rows
    ]
    return f"{TASKS[task].metric.capitalize()} by length. {'; '.join(lines)}."


def _seen(task: str, rows: list[TaskSummary]) -> str:
    """Who keeps what it learned to the longest length that it can run."""
    longest = max(n for row in rows for n in _points(row))
    ends = {row.encoding: _points(row).get(longest) for row in rows}
    kept = [name for name, end in ends.items() if end is not None and end >= LEARNED]
    if kept:
        return f"Above {LEARNED} still at {longest:,} {TASKS[task].counts}: {', '.join(kept)}."
    return f"None stays above {LEARNED} to {longest:,} {TASKS[task].counts}."
