"""Which encoding for what: a sentence for each task, and nothing that its seeds do not carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posenc.compare import pooled
from posenc.compare.results import Study, TaskSummary
from posenc.compare.task_summary import say_learned
from posenc.report.sentence import listed
from posenc.statistics.ranks import rank
from posenc.statistics.scores import Scores
from posenc.tasks.known import TASKS


def say_for_what(study: Study, rows: Sequence[TaskSummary]) -> Iterator[str]:
    """For each task who learned it and which encoding to take for it, then for all together."""
    scores = pooled.scores_of(study)
    for task in scores.tasks:
        yield from say_learned([row for row in rows if row.task == task])
        means, gaps = pooled.task_scores(scores, task)
        length = next(trial.train_length for trial in study.trials if trial.task == task)
        yield _taken(f"{task} beyond {length:,} {TASKS[task].counts}", means, gaps, scores)
    if len(scores.tasks) > 1:
        yield _taken("all tasks together", *pooled.pooled_scores(scores), scores)


def _taken(what: str, means: dict[str, float], gaps: pooled.Gaps, scores: Scores) -> str:
    """The first where the seeds tell it from all others, else the tie that it stands in."""
    if not means:
        return f"For {what} nothing here tells which to take."
    ranking = rank(means, gaps)
    best, *others = ranking.order
    if not others:
        return f"For {what} only {best} is left ({means[best]:.3f})."
    if len(scores.seeds) < 2:
        shown = listed([f"{name} {means[name]:.3f}" for name in ranking.order])
        return f"For {what} one seed tells nothing apart; it measured {shown}."
    if ranking.ranks[best] == (1, 1):
        gap = gaps.get((best, others[0])) or gaps[others[0], best]
        return (
            f"For {what} take {best}: {means[best]:.3f}, {abs(gap.value):.3f} ± {gap.half:.3f} "
            f"above {others[0]}."
        )
    first = [name for name in ranking.order if ranking.ranks[name][0] == 1]
    tie = list(dict.fromkeys([*ranking.tiers[0], *first]))
    tie = tie if len(tie) > 1 else list(ranking.order)
    behind = [name for name in ranking.order if name not in tie]
    rest = f"; behind, as the seeds tell: {listed(behind)}" if behind else ""
    shown = listed([f"{name} {means[name]:.3f}" for name in tie])
    return f"For {what} the seeds cannot separate {shown}{rest}."
