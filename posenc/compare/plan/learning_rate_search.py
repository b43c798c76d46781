"""Choose each encoding's learning rate by validation loss, before its trials."""

import math
from collections.abc import Sequence
from dataclasses import replace

from posenc.compare.results import FACTORS, RateCheck, RateTried, Study, TrialResult
from posenc.compare.trial.config import TrialConfig

RATE_STEPS = 5
"""A rate is chosen by trials of a fifth of the steps."""


def check_rates(lr: float) -> None:
    """Raise ValueError if a rate that would be tried is not positive and finite."""
    tried = [lr * factor for factor in FACTORS]
    if min(tried) <= 0 or max(tried) == math.inf:
        raise ValueError(
            f"--check-lr tries --lr {lr:g} times {', '.join(f'{factor:g}' for factor in FACTORS)}, "
            f"and {min(tried):g} to {max(tried):g} are not all positive and finite. Use another "
            "--lr."
        )


def rate_trials(trials: Sequence[TrialConfig]) -> tuple[TrialConfig, ...]:
    """Return trials of every task and encoding with its first seed at each rate, of a fifth of the
    steps, tested at the training length only."""
    first = {(trial.task, trial.encoding): trial for trial in reversed(trials)}
    return tuple(
        replace(
            trial,
            lr=trial.lr * factor,
            steps=max(1, trial.steps // RATE_STEPS),
            test_lengths=(trial.train_length,),
        )
        for trial in reversed(first.values())
        for factor in FACTORS
    )


def choose(results: Sequence[TrialResult]) -> tuple[RateCheck, ...]:
    """Choose, for every task and encoding, the rate with the lowest validation loss at the end of
    training, never one whose trial failed.

    Raises: ValueError for a trial that was tested beyond the training length.
    """
    found: dict[tuple[str, str], list[RateTried]] = {}
    for result in results:
        config = result.config
        if config.test_lengths != (config.train_length,):
            raise ValueError(
                f"A learning rate is chosen at the training length {config.train_length} only, "
                f"but this trial was tested at {', '.join(map(str, config.test_lengths))}."
            )
        bits = result.training[-1].valid if result.reason is None and result.training else None
        tried = RateTried(config.lr, bits, result.reason)
        found.setdefault((config.task, config.encoding), []).append(tried)
    return tuple(
        RateCheck(task, encoding, tuple(tried), _best(tried))
        for (task, encoding), tried in found.items()
    )


def at_chosen_rates(study: Study, results: Sequence[TrialResult]) -> Study:
    """Return the study with its trials at the rates chosen from `results` of `rate_trials`, or at
    --lr if no rate could be trained."""
    rates = choose(results)
    chosen = {(each.task, each.encoding): each.chosen for each in rates}
    trials = tuple(
        replace(trial, lr=chosen.get((trial.task, trial.encoding)) or trial.lr)
        for trial in study.trials
    )
    return replace(study, trials=trials, rates=rates)


def _best(tried: Sequence[RateTried]) -> float | None:
    known = [t for t in tried if t.bits is not None and math.isfinite(t.bits)]
    return min(known, key=lambda t: t.bits or 0.0).lr if known else None
