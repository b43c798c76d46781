"""From trials to one row per encoding."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import fmean

from posenc.compare.results import (
    CaseScore,
    CaseSummary,
    EncodingSummary,
    LengthSummary,
    Study,
    TaskSummary,
    TrainingPoint,
    TrialResult,
)
from posenc.tasks.registry import TASKS, TEXT
from posenc.tasks.scoring import LEAST_LEARNED_EXACT_MATCH

REACH_TOLERANCE = 1.05
"""How far above its own loss at the training length an encoding may come and still count as
reaching."""
HALF_RATE_FRACTIONS = {"cosine": 0.313, "linear": 0.311, "constant": 0.5, "wsd": 0.463}
"""Fraction of the steps, by schedule, after which half of the sum of the learning rates is spent,
as much as in a run of half the steps, with the usual warm-up (posenc.compare.trial.config). At a
constant rate that run is the beginning of the longer one: half of the steps."""


def summarise(study: Study) -> tuple[EncodingSummary, ...]:
    """Return one row per encoding with a finished trial, in the order given."""
    rows = []
    results_of_encoding: dict[str, list[TrialResult]] = {name: [] for name in study.encodings}
    for result in study.finished:
        results_of_encoding[result.config.encoding].append(result)
    for name, results in results_of_encoding.items():
        if not results:
            continue
        by_length = _summarise_lengths(results)
        speeds = [
            r.timing.tokens_per_second
            for r in results
            if r.timing is not None and r.timing.tokens_per_second
        ]
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
    """Return the longest tested length up to which the mean loss stays within REACH_TOLERANCE times
    that at the training length; None if there is none at the training length."""
    max_mean = REACH_TOLERANCE * mean_at(scores, train_length)
    reached_length = None
    for score in sorted(scores, key=lambda score: score.length):
        if score.length < train_length:
            continue
        if score.mean is None or not score.mean <= max_mean < math.inf:
            break
        reached_length = score.length
    return reached_length


def _summarise_lengths(results: Sequence[TrialResult]) -> tuple[LengthSummary, ...]:
    """Return the mean and spread over an encoding's trials at each length, or why it cannot run
    there."""
    rows = []
    for scores in zip(*(r.by_length for r in results), strict=True):
        losses = [s.bits_per_byte for s in scores if s.bits_per_byte is not None]
        if len(losses) < len(scores):
            reason = next(s.cannot for s in scores if s.cannot)
            rows.append(LengthSummary(scores[0].length, None, None, reason))
        else:
            mean, spread = sum(losses) / len(losses), (max(losses) - min(losses)) / 2
            rows.append(LengthSummary(scores[0].length, mean, spread))
    return tuple(rows)


def mean_at(scores: Sequence[LengthSummary], length: int) -> float:
    """Return the mean loss at one length in bits per byte, inf if there is none."""
    return next((s.mean for s in scores if s.length == length and s.mean is not None), math.inf)


def has_learned(result: TrialResult) -> bool:
    """Return True if a trial has learned its task, judged at the training length only."""
    score = result.by_case[0].exact_match if result.by_case else None
    return score is not None and score >= LEAST_LEARNED_EXACT_MATCH


def shown_score(task: str, score: CaseScore) -> float | None:
    """Return the score that a task's table shows, from 0 to 1: exact match or accuracy of tokens;
    None if the encoding cannot run there."""
    shows_exact_match = TASKS[task].metric == "exact match"
    return score.exact_match if shows_exact_match else score.token_accuracy


def summarise_tasks(study: Study) -> tuple[TaskSummary, ...]:
    """Return one row per task and encoding with a finished trial, in the order given."""
    rows = []
    for task in study.sequence_tasks:
        task_study = study.of_task(task)
        for encoding in task_study.encodings:
            results = [r for r in task_study.finished if r.config.encoding == encoding]
            if results:
                rows.append(_task_row(task, encoding, results))
    return tuple(rows)


def group_by_task(rows: Sequence[TaskSummary]) -> Iterator[tuple[str, list[TaskSummary]]]:
    """Yield each task with its rows."""
    for task, group in groupby(rows, key=lambda row: row.task):
        yield task, list(group)


def estimate_bits_of_doubling_steps(results: Sequence[TrialResult]) -> dict[str, float]:
    """Return an estimate of the bits that the last doubling of the steps saved, by encoding.

    It is the fall of the validation loss since the step at which half of the sum of the learning
    rates was spent. For 400 steps it gives 0.59 bits on average; separate runs of 200 and of 400
    steps differ by 0.50. An encoding is left out if its curve begins later.
    """
    falls: dict[str, list[float]] = {}
    for result in results:
        fraction = HALF_RATE_FRACTIONS[result.config.schedule]
        loss = _loss_at_step(result.training, fraction * result.config.steps)
        if loss is not None:
            fall = loss - result.training[-1].valid
            falls.setdefault(result.config.encoding, []).append(fall)
    return {name: fmean(falls_of_trials) for name, falls_of_trials in falls.items()}


def falls_since_half(results: Sequence[TrialResult]) -> dict[str, float]:
    """Return how many bits the validation loss fell from half of the steps to their end, by
    encoding, the mean over its trials. It is what the curve shows, and falls partly because the
    learning rate decays over these steps. Trials whose curve begins later are left out."""
    falls: dict[str, list[float]] = {}
    for result in results:
        loss_at_half = _loss_at_step(result.training, result.config.steps / 2)
        if loss_at_half is not None:
            fall = loss_at_half - result.training[-1].valid
            falls.setdefault(result.config.encoding, []).append(fall)
    return {name: fmean(falls_of_trials) for name, falls_of_trials in falls.items()}


def _loss_at_step(curve: Sequence[TrainingPoint], step: float) -> float | None:
    """Return the validation loss after a step inside a curve, on a straight line between the two
    points around it; None if they are not there."""
    for point_before, point_after in pairwise(curve):
        if point_before.step <= step < point_after.step:
            num_steps = point_after.step - point_before.step
            fraction = (step - point_before.step) / num_steps
            return point_before.valid + fraction * (point_after.valid - point_before.valid)
    return None


def bits_saved_by_doubling(study: Study) -> dict[str, float]:
    """Return how many bits a doubling of the steps saved, for each encoding: measured since the
    shorter trials that chose the rates, or else as `estimate_bits_of_doubling_steps` estimates."""
    measured_bits = _bits_saved_since_search(study)
    return measured_bits or estimate_bits_of_doubling_steps(study.of_task(TEXT).finished)


def is_doubling_measured(study: Study) -> bool:
    """Return True if separate, shorter trials measured what a doubling of the steps saves; False if
    it is only estimated from the curves of the trainings."""
    return bool(_bits_saved_since_search(study))


def _bits_saved_since_search(study: Study) -> dict[str, float]:
    """Return how many bits a doubling of the steps saved on average since the shorter trials that
    chose the rates, for each encoding; {} unless every encoding has such a trial."""
    saved_bits = {}
    # With several seeds the first one, which the search has, too.
    first_results = {
        r.config.encoding: r
        for r in sorted(study.of_task(TEXT).finished, key=lambda r: -r.config.seed)
        if r.training
    }
    for rate_check in study.rates:
        if rate_check.task != TEXT or rate_check.encoding not in first_results:
            continue
        result = first_results[rate_check.encoding]
        tried_steps = rate_check.steps_tried(result.config.steps)
        num_doublings = math.log2(result.config.steps / tried_steps)
        if rate_check.best is not None and rate_check.best.bits is not None and num_doublings:
            saved_bits[rate_check.encoding] = (
                rate_check.best.bits - result.training[-1].valid
            ) / num_doublings
    return saved_bits if saved_bits.keys() == first_results.keys() else {}


def _task_row(task: str, encoding: str, results: Sequence[TrialResult]) -> TaskSummary:
    """Return the row of an encoding in a task's table, from its trials' results."""
    cases = []
    for scores in zip(*(result.by_case for result in results), strict=True):
        why_cannot = next((score.cannot for score in scores if score.cannot), None)
        known_scores = [value for s in scores if (value := shown_score(task, s)) is not None]
        cases.append(
            CaseSummary(
                length=scores[0].length,
                variant=scores[0].variant,
                mean=fmean(known_scores) if known_scores and why_cannot is None else None,
                seeds=() if why_cannot else tuple(known_scores),
                cannot=why_cannot,
            )
        )
    return TaskSummary(
        task=task,
        encoding=encoding,
        parameters=results[0].parameters,
        num_seeds=len(results),
        learned=sum(map(has_learned, results)),
        cases=tuple(cases),
    )
