"""What the tasks of a study say of tasks like these: differences and probabilities of improvement,
with the tasks taken for a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posenc.compare.judge.pooled import (
    POOLED_SEEDS,
    RESOLUTION,
    TOO_LITTLE,
    anchors_of,
    run_enough,
    scores_of,
    shared_scores,
)
from posenc.compare.results import Study
from posenc.statistics.estimate import Estimate
from posenc.statistics.like_tasks import (
    LEAST_TASKS,
    Probability,
    difference_on_like_tasks,
    probability_of_improvement,
)

TITLE = "On tasks like these"
MEANING = (
    "Here the tasks are a sample too, as the seeds are: ± is the 95 % interval over other tasks "
    "and seeds, drawn one after the other, and as wide as so few tasks make it. Against an anchor: "
    "the score minus the anchor's, over the tasks that both learned with "
    f"{POOLED_SEEDS} seeds or more in common. Better than it: how often a trial is above one of "
    "the anchor's on the same task, an equal one counting half, the mean over those tasks, with "
    "its interval in brackets; 0.5 is no difference. There is no interval "
    f"for fewer than {LEAST_TASKS} tasks, nor for a probability on which all pairs of seeds of all "
    "tasks agree. Nothing is corrected for the number of comparisons."
)


def like_task_rows(study: Study, names: Sequence[str]) -> list[list[str]]:
    """The header and a row for each of these encodings; nothing where there is none, or no
    anchor."""
    scores, anchors = run_enough(scores_of(study)), anchors_of(study)
    if not anchors or not names:
        return []
    said = ("against", "better than")
    header = ["encoding", *(f"{each} {name}" for name in anchors for each in said)]
    rows = []
    for name in names:
        row = [name]
        for anchor in anchors:
            if name == anchor:
                row += ["–", "–"]
                continue
            shared = shared_scores(scores, anchor, name)
            row.append(_difference(difference_on_like_tasks(shared, anchor, name, RESOLUTION)))
            row.append(_share(probability_of_improvement(shared, anchor, name)))
        rows.append(row)
    return [header, *rows]


def _difference(gap: Estimate) -> str:
    if not gap.count:
        return TOO_LITTLE
    half = f" ± {gap.half:.3f}" if gap.half < math.inf else ", few tasks"
    return f"{gap.value:+.3f}{half}"


def _share(found: Probability) -> str:
    if not found.count:
        return "–"
    if found.interval is None:
        return f"{found.value:.2f}"
    low, high = found.interval
    return f"{found.value:.2f} ({low:.2f}–{high:.2f})"
