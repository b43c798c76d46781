"""The tasks of a study pooled: a score for each encoding, and what one task does to its rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import fmean

import numpy as np

from posenc.compare.judge.standing import ANCHORS
from posenc.compare.judge.summary import learned, metric_of
from posenc.compare.judge.tiers import from_anchor
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.evaluate import SEQUENCES
from posenc.statistics.anchors import against_anchors
from posenc.statistics.estimate import Estimate
from posenc.statistics.leave_one_out import leave_one_task_out
from posenc.statistics.paired import paired_difference
from posenc.statistics.pooled import pooled_difference, pooled_score
from posenc.statistics.ranks import rank
from posenc.statistics.scores import Scores
from posenc.tasks.known import TEXT

Gaps = dict[tuple[str, str], Estimate]
"""Score of the second encoding minus score of the first."""
RESOLUTION = 1 / SEQUENCES
TASK_SEEDS, POOLED_SEEDS = 5, 3
"""Seeds of both, of a task alone and of each of several, below which nothing is told apart. Seeds
of these tasks come in two kinds, and few of one kind look like no spread at all: of six equal
encodings whose trials succeed or fail at even odds, something was told apart at 95 % in 36, 29, 9
and 4 % of simulated studies with 2, 3, 4 and 5 seeds of one task, and of two, three and four tasks
together in 15, 9 and 9 % with 2 seeds and 3, 7 and 5 % with 3."""
TOO_LITTLE = "too little in common"
TITLE = "All tasks together (higher is better)"
SCORE = (
    "The score of a trial is the mean of its task's metric over all tests but that of the training "
    "length; of text it is the way that its mean loss there has come from NoPE's, which is 0, to "
    "the lowest mean loss of an encoding at the training length, which is 1, cut to 0 and 1; text "
    "counts where NoPE is one of the encodings and is above that"
)
MEANING = (
    f"{SCORE}; pooled is the interquartile mean of the trials over tasks and seeds, ± its 95 % "
    "interval over seeds. Only trials that learned their task and can run all of its tests count, "
    "so pooled scores of encodings that learned other tasks do not compare. A column of an anchor "
    "does: it is the score minus the anchor's over the tasks that both learned with "
    f"{POOLED_SEEDS} seeds or more in common, two tasks at least, with p corrected by Holm. Tier "
    "and rank stand on such differences of all pairs: a tier holds what is told to be behind none "
    "but those of the tiers before it, and the ranks that an encoding may have hold together with "
    "95 % (Holm). Tasks that nobody has run with so many seeds are left out where others are not. "
    "One task left out: the best and the worst rank of the pooled scores over all choices of that "
    "task."
)
ZERO = "nope"
"""The encoding whose mean loss beyond the training length scores 0."""


def pooled_rows(study: Study) -> list[list[str]]:
    """The header and a row for each encoding, the highest score first; nothing with fewer than two
    tasks, or where no trial counts."""
    scores = run_enough(scores_of(study))
    counts = scores.counted().sum(axis=(1, 2))
    if len(scores.tasks) < 2 or not counts.any():
        return []
    anchors = anchors_of(study)
    gaps = against_anchors(scores.encodings, anchors, lambda a, b: _pooled_gap(scores, a, b))
    left_out, planned = leave_one_task_out(scores), len(scores.tasks) * len(scores.seeds)
    ranking = rank(*pooled_scores(scores))
    header = ["encoding", "tier", "rank", "trials", "pooled", "one task left out"]
    header += [f"against {name}" for name in anchors]
    rows = []
    for name, count in zip(scores.encodings, counts, strict=True):
        found = pooled_score(scores, name, RESOLUTION)
        half = f" ± {found.half:.3f}" if found.half < math.inf else ""
        row = [
            name,
            f"{ranking.tier(name)}" if count else "–",
            _from_to(*ranking.ranks[name]) if count else "–",
            f"{count}/{planned}",
            f"{found.value:.3f}{half}" if count else "–",
            _from_to(*left_out[name]) if count else "–",
            *(from_anchor(gaps, anchor, name, TOO_LITTLE) for anchor in anchors),
        ]
        rows.append((ranking.order.index(name) if count else len(counts), row))
    return [header, *(row for _, row in sorted(rows, key=lambda each: each[0]))]


def counted_names(rows: Sequence[Sequence[str]]) -> list[str]:
    """The encodings of `pooled_rows` that have a trial which counts, in its order."""
    return [row[0] for row in rows[1:] if row[1] != "–"]


def anchors_of(study: Study) -> list[str]:
    """The anchors among the encodings that were checked, without a class of the user's of that
    name."""
    own = {trial.encoding for trial in study.trials if not trial.code}
    return [name for name in ANCHORS if name in own and name not in study.unchecked]


def task_scores(scores: Scores, task: str) -> tuple[dict[str, float], Gaps]:
    """Means beyond the training length and paired differences, of the encodings that learned the
    task in a seed and can run all its tests."""
    index = list(scores.tasks).index(task)
    values = np.where(scores.counted(), scores.values, np.nan)[:, index]
    known = {
        name: row.tolist()
        for name, row in zip(scores.encodings, values, strict=True)
        if not np.isnan(row).all()
    }
    means = {name: float(np.nanmean(row)) for name, row in known.items()}
    gaps = {
        (a, b): paired_difference(known[a], known[b], RESOLUTION) for a, b in combinations(known, 2)
    }
    return means, {pair: _known(gap, gap.count >= TASK_SEEDS) for pair, gap in gaps.items()}


def pooled_scores(scores: Scores) -> tuple[dict[str, float], Gaps]:
    """The same over all tasks; pairs by the trials that both have, so that an encoding that learned
    only the easy tasks gains nothing by it."""
    scores = run_enough(scores)
    counts = scores.counted().sum(axis=(1, 2))
    known = [name for name, count in zip(scores.encodings, counts, strict=True) if count]
    means = {name: pooled_score(scores, name, RESOLUTION).value for name in known}
    return means, {(a, b): _pooled_gap(scores, a, b) for a, b in combinations(known, 2)}


def shared_scores(scores: Scores, a: str, b: str) -> Scores:
    """Of the tasks that both learned with enough seeds in common; a task that one of them learned
    with fewer is left out of their difference, and does not take its error away."""
    return scores.of_both(a, b, POOLED_SEEDS)


def run_enough(scores: Scores) -> Scores:
    """Without the tasks that were run with fewer seeds than it takes to tell, if others were not:
    one that a leaderboard has just begun would hide what the others tell."""
    seeds = (~np.isnan(scores.values)).sum(axis=2).max(axis=0, initial=0)
    enough = seeds >= POOLED_SEEDS
    return scores.of_tasks(enough) if enough.any() else scores


def _pooled_gap(scores: Scores, a: str, b: str) -> Estimate:
    shared = shared_scores(scores, a, b)
    if len(shared.tasks) > 1:
        return pooled_difference(shared, a, b, RESOLUTION)
    return _known(pooled_difference(scores, a, b, RESOLUTION), False)


def _known(gap: Estimate, enough: bool) -> Estimate:
    """The difference; its error is not known where the seeds are not enough."""
    return gap if enough else replace(gap, error=math.inf)


def scores_of(study: Study) -> Scores:
    """The score of every trial, text first where it has scores; of encodings that were checked."""
    names = [name for name in study.encodings if name not in study.unchecked]
    text = text_scores(study)
    tasks = [TEXT] if text else []
    tasks += dict.fromkeys(t.task for t in study.trials if t.task != TEXT)
    seeds = sorted({t.seed for t in study.trials})
    values = np.full((len(names), len(tasks), len(seeds)), np.nan)
    failed = np.zeros(values.shape, bool)
    for (name, seed), score in text.items():
        values[names.index(name), 0, seeds.index(seed)] = score
    for result in study.finished:
        config = result.config
        if config.task != TEXT and config.encoding in names:
            at = (names.index(config.encoding), tasks.index(config.task), seeds.index(config.seed))
            values[at] = _beyond(result)
            failed[at] = not np.isnan(values[at]) and not learned(result)
    return Scores(names, tasks, seeds, values, failed)


def _from_to(low: int, high: int) -> str:
    return f"{low}" if low == high else f"{low}–{high}"


def _beyond(result: TrialResult) -> float:
    """NaN where a test cannot run: the mean of the others would be one of easier tests."""
    found = [metric_of(result.config.task, score) for score in result.by_case[1:]]
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else math.nan


def text_scores(study: Study) -> dict[tuple[str, int], float]:
    """By encoding and seed, of the encodings that were checked:

    score = (zero - loss) / (zero - best), cut to 0 .. 1

    loss is a trial's mean bits per byte over all tests but that of the training length, zero the
    mean loss of NoPE there, and best the lowest mean over seeds that an encoding has at the
    training length: nothing is chosen by unseen lengths. Trials that cannot run a test have no
    score; nobody has one where NoPE is missing or is not above `best`, which leaves no scale.
    """
    losses: dict[tuple[str, int], tuple[float, float]] = {}
    own = set()
    for result in study.finished:
        config = result.config
        if config.task == TEXT and config.encoding not in study.unchecked:
            bits = list(_bits(result))
            if len(bits) > 1 and len(bits) == len(config.test_lengths):
                losses[config.encoding, config.seed] = bits[0], fmean(bits[1:])
                if not config.code:
                    own.add(config.encoding)
    if ZERO not in own:  # or it is a class of the user's of that name
        return {}
    zero = fmean(far for (name, _), (_, far) in losses.items() if name == ZERO)
    names = dict.fromkeys(name for name, _ in losses)
    best = min(fmean(near for (n, _), (near, _) in losses.items() if n == name) for name in names)
    if not zero > best:
        return {}
    return {
        key: min(max((zero - far) / (zero - best), 0.0), 1.0) for key, (_, far) in losses.items()
    }


def _bits(result: TrialResult) -> Iterator[float]:
    """At the lengths that it can run, the training length first."""
    for score in result.by_length:
        if score.bits_per_byte is not None and math.isfinite(score.bits_per_byte):
            yield score.bits_per_byte
