"""From trials to one row per encoding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from posenc.compare.results import (
    CaseScore,
    CaseSummary,
    EncodingSummary,
    LengthSummary,
    Study,
    TaskSummary,
    TrialResult,
)
from posenc.tasks.known import TASKS, TEXT

WITHIN = 1.05
"""How far above its own loss at the training length an encoding may come and still count as
reaching."""
LEARNED = 0.9
"""The exact match at the training length below which a trial has not learned its task: how it does
beyond says nothing about its encoding then."""


def summarise(study: Study) -> tuple[EncodingSummary, ...]:
    """One row per encoding that has a finished trial, in the order asked for."""
    groups = {
        name: [r for r in study.finished if r.config.encoding == name] for name in study.encodings
    }
    rows = []
    for name, results in groups.items():
        if not results:
            continue
        by_length = _by_length(results)
        speeds = [r.timing.tokens_per_second for r in results if r.timing]
        rows.append(
            EncodingSummary(
                encoding=name,
                parameters=results[0].parameters,
                num_seeds=len(results),
                by_length=by_length,
                reach=_reach(by_length, study.trials[0].train_length),
                tokens_per_second=sum(speeds) / len(speeds) if speeds else None,
            )
        )
    return tuple(rows)


def _reach(scores: Sequence[LengthSummary], train_length: int) -> int | None:
    """The last tested length before the first one at which the loss leaves the bound."""
    bound = WITHIN * mean_at(scores, train_length)
    reach = None
    for score in sorted(scores, key=lambda score: score.length):
        if score.length < train_length:
            continue
        if score.mean is None or not score.mean <= bound < math.inf:
            break
        reach = score.length
    return reach


def _by_length(results: Sequence[TrialResult]) -> tuple[LengthSummary, ...]:
    rows = []
    for scores in zip(*(r.by_length for r in results), strict=True):
        values = [s.bits_per_byte for s in scores if s.bits_per_byte is not None]
        if len(values) < len(scores):
            reason = next(s.cannot for s in scores if s.cannot)
            rows.append(LengthSummary(scores[0].length, None, None, reason))
        else:
            mean, spread = sum(values) / len(values), (max(values) - min(values)) / 2
            rows.append(LengthSummary(scores[0].length, mean, spread))
    return tuple(rows)


def mean_at(scores: Sequence[LengthSummary], length: int) -> float:
    """The mean at one length, infinite where there is none."""
    return next((s.mean for s in scores if s.length == length and s.mean is not None), math.inf)


def learned(result: TrialResult) -> bool:
    """Whether a trial of a task passes the gate. Reads the training length and nothing else."""
    score = result.by_case[0].exact_match if result.by_case else None
    return score is not None and score >= LEARNED


def metric_of(task: str, score: CaseScore) -> float | None:
    """The score that a task's table shows."""
    exact = TASKS[task].metric == "exact match"
    return score.exact_match if exact else score.token_accuracy


def summarise_tasks(study: Study) -> tuple[TaskSummary, ...]:
    """One row per task and encoding with a finished trial, in the order asked for."""
    rows = []
    for task in dict.fromkeys(t.task for t in study.trials if t.task != TEXT):
        part = study.of_task(task)
        for encoding in part.encodings:
            results = [r for r in part.finished if r.config.encoding == encoding]
            if results:
                rows.append(_row(task, encoding, results))
    return tuple(rows)


def say_learned(rows: Sequence[TaskSummary]) -> Iterator[str]:
    """A sentence for each task about who has learned it."""
    for task, group in groupby(rows, key=lambda row: row.task):
        counts = [(row.encoding, row.learned, row.num_seeds) for row in group]
        done, planned = sum(c[1] for c in counts), sum(c[2] for c in counts)
        failed = ", ".join(f"{name} {k}/{n}" for name, k, n in counts if k < n)
        rest = f"; the others ({failed}) are kept out of its means" if failed else ""
        yield (
            f"On the task {task} {done} of {planned} trials reached an exact match of {LEARNED} at "
            f"the training length{rest}."
        )


def _row(task: str, encoding: str, results: Sequence[TrialResult]) -> TaskSummary:
    passed = [learned(result) for result in results]
    cases = []
    for scores in zip(*(result.by_case for result in results), strict=True):
        values = [metric_of(task, score) for score in scores]
        cannot = next((score.cannot for score in scores if score.cannot), None)
        known = tuple(value for value in values if value is not None)
        good = [v for v, ok in zip(values, passed, strict=True) if ok and v is not None]
        cases.append(
            CaseSummary(
                length=scores[0].length,
                variant=scores[0].variant,
                mean=sum(good) / len(good) if good and cannot is None else None,
                seeds=() if cannot else known,
                cannot=cannot,
            )
        )
    return TaskSummary(
        task=task,
        encoding=encoding,
        parameters=results[0].parameters,
        num_seeds=len(results),
        learned=sum(passed),
        cases=tuple(cases),
    )
