"""Which encoding for what: a sentence for each task, and nothing that its seeds do not carry."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from posenc.compare import pooled
from posenc.compare.results import Study, TaskSummary
from posenc.compare.task_summary import say_learned
from posenc.report.sentence import listed
from posenc.statistics.ranks import rank
from posenc.tasks.known import TASKS, TEXT


def say_for_what(study: Study, rows: Sequence[TaskSummary]) -> Iterator[str]:
    """For each task who learned it and which encoding to take for it, then for all together."""
    scores = pooled.scores_of(study)
    for task in (name for name in scores.tasks if name != TEXT):
        yield from say_learned([row for row in rows if row.task == task])
        means, gaps = pooled.task_scores(scores, task)
        length = next(trial.train_length for trial in study.trials if trial.task == task)
        shown = {name: f"{name} {mean:.3f}" for name, mean in means.items()}
        what = f"{task} beyond {length:,} {TASKS[task].counts}"
        yield _taken(what, means, gaps, shown, f"{pooled.TASK_SEEDS} seeds of both")
    if len(pooled.run_enough(scores).tasks) > 1:
        means, gaps = pooled.pooled_scores(scores)
        shown = {name: name for name in means}  # means of unequal trials do not compare
        needed = f"{pooled.POOLED_SEEDS} seeds of both in each task"
        yield _taken("all tasks together", means, gaps, shown, needed)


def _taken(
    what: str,
    means: Mapping[str, float],
    gaps: pooled.Gaps,
    shown: Mapping[str, str],
    needed: str,
) -> str:
    """The first where the seeds tell it from all others, else the tie that it stands in.

    shown: how each encoding is written in a tie. needed: the seeds without which nothing is told.
    """
    if not means:
        return f"For {what} nothing here tells which to take."
    ranking = rank(means, gaps)
    ranks, (best, *others) = ranking.ranks, ranking.order
    if not others:
        return f"For {what} only {best} is left ({means[best]:.3f})."
    if all(gap.half == math.inf for gap in gaps.values()):
        names = listed([shown[name] for name in ranking.order])
        return f"For {what} these seeds describe and do not decide, which takes {needed}: {names}."
    if ranks[best] == (1, 1):
        gap = gaps.get((best, others[0])) or gaps[others[0], best]
        return (
            f"For {what} take {best}: {means[best]:.3f}, {abs(gap.value):.3f} ± {gap.half:.3f} "
            f"above {others[0]}."
        )
    tie = [name for name in ranking.order if ranks[name][0] == 1]
    if len(tie) == 1:  # it is told from some, and those from others
        tie = [name for name in ranking.order if ranks[name][0] <= ranks[tie[0]][1]]
    behind = [name for name in ranking.order if name not in tie]
    rest = f"; behind, as the seeds tell: {listed(behind)}" if behind else ""
    return f"For {what} the seeds cannot separate {listed([shown[name] for name in tie])}{rest}."
