"""Choose each encoding's learning rate by validation loss, before its trials."""

import math
from collections.abc import Sequence
from dataclasses import replace

from posenc.compare.rates import chosen_rates
from posenc.compare.results import FACTORS, RATE_STEPS, Study, TrialResult
from posenc.compare.trial.config import TrialConfig


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


def at_chosen_rates(study: Study, results: Sequence[TrialResult]) -> Study:
    """Return the study with its trials at the rates chosen from `results` of `rate_trials`, or at
    --lr if no rate could be trained."""
    rates = chosen_rates(results)
    chosen = {(rate.task, rate.encoding): rate.chosen for rate in rates}
    trials = tuple(
        replace(trial, lr=chosen.get((trial.task, trial.encoding)) or trial.lr)
        for trial in study.trials
    )
    return replace(study, trials=trials, rates=rates)
