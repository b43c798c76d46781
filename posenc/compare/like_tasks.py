"""What the tasks of a study say of tasks like these: differences and probabilities of improvement,
with the tasks taken for a sample."""

from __future__ import annotations

import math

from posenc.compare.pooled import RESOLUTION, anchors_of, counted_scores, pooled_rows
from posenc.compare.results import Study
from posenc.statistics.estimate import Estimate
from posenc.statistics.like_tasks import (
    LEAST_TASKS,
    difference_on_like_tasks,
    probability_of_improvement,
)

TITLE = "On tasks like these"
MEANING = (
    "Here the tasks are a sample too, as the seeds are: ± is the 95 % interval over other tasks "
    "and seeds, drawn one after the other, and as wide as so few tasks make it. Against an anchor: "
    "the pooled score minus the anchor's, over the trials that both have. Better than it: how "
    "often a trial is above one of the anchor's on the same task, an equal one counting half, the "
    "mean over tasks, with its interval in brackets; 0.5 is no difference. There is no interval "
    f"for fewer than {LEAST_TASKS} tasks, nor for a probability on which all pairs of seeds of all "
    "tasks agree. Nothing is corrected for the number of comparisons."
)


def like_task_rows(study: Study) -> list[list[str]]:
    """The header and a row for each encoding that has a trial which counts, in the order of
    `pooled_rows`; nothing where there is no anchor or no two tasks to pool."""
    scores, anchors = counted_scores(study), anchors_of(study)
    order = [row[0] for row in pooled_rows(study)[1:] if row[1] != "–"]
    if not anchors or not order:
        return []
    said = ("against", "better than")
    header = ["encoding", *(f"{each} {name}" for name in anchors for each in said)]
    rows = []
    for name in order:
        row = [name]
        for anchor in anchors:
            if name == anchor:
                row += ["–", "–"]
                continue
            gap = difference_on_like_tasks(scores, anchor, name, RESOLUTION)
            row += [_difference(gap), _share(probability_of_improvement(scores, anchor, name))]
        rows.append(row)
    return [header, *rows]


def _difference(gap: Estimate) -> str:
    if not gap.count:
        return "no trial of both"
    half = f" ± {gap.half:.3f}" if gap.half < math.inf else ", few tasks"
    return f"{gap.value:+.3f}{half}"


def _share(found: Estimate) -> str:
    if not found.count:
        return "–"
    if not found.half < math.inf:
        return f"{found.value:.2f}"
    low, high = max(found.value - found.half, 0), min(found.value + found.half, 1)
    return f"{found.value:.2f} ({low:.2f}–{high:.2f})"
