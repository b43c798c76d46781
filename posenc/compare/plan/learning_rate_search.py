"""Check learning rates, and choose each encoding's by validation loss, before its trials."""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from posenc.compare.options import Options
from posenc.compare.results import (
    RATE_FACTORS,
    RATE_STEPS_DIVISOR,
    RateCheck,
    RateTried,
    Study,
    TrialResult,
)
from posenc.compare.trial.config import TrialConfig


def check_rates(options: Options) -> None:
    """Raise ValueError for rates and a warm-up that no trial can have; also if a rate that
    --search-lr or --tune would try is not positive and finite, as --lr may be close to the limits
    of a float."""
    if not 0 < options.lr <= sys.float_info.max:
        raise ValueError(f"--lr must be a positive number, got {options.lr}.")
    if not 0 < options.encoding_lr <= sys.float_info.max:
        raise ValueError(f"--encoding-lr must be a positive number, got {options.encoding_lr}.")
    is_share = 0 <= options.warmup < 1
    if not is_share and not (options.warmup >= 1 and options.warmup == options.warmup // 1):
        raise ValueError(
            "--warmup must be a whole number of steps, or a part of --steps from 0 to 1, got "
            f"{options.warmup:g}."
        )
    if not options.search_lr and not options.tune:
        return
    tried_rates = [options.lr * factor for factor in RATE_FACTORS]
    if min(tried_rates) <= 0 or max(tried_rates) == math.inf:
        factors_in_words = ", ".join(f"{factor:g}" for factor in RATE_FACTORS)
        raise ValueError(
            f"--search-lr tries --lr {options.lr:g} times {factors_in_words}, and "
            f"{min(tried_rates):g} to {max(tried_rates):g} are not all positive and finite. Use "
            "another --lr."
        )
    if not is_share:
        raise ValueError(
            f"--warmup {options.warmup:g} counts steps, and trials that choose a rate have fewer. "
            "Give a part of --steps, such as 0.05."
        )


def check_warmup(trials: Sequence[TrialConfig]) -> None:
    """Raise ValueError if the warm-up of a trial is longer than its training."""
    for trial in trials:
        if trial.warmup > trial.steps:
            raise ValueError(
                f"--warmup {trial.warmup:g} is more than the {trial.steps:,} steps of training. "
                "Give fewer, or more --steps."
            )


def rate_trials(trials: Sequence[TrialConfig]) -> tuple[TrialConfig, ...]:
    """Return the trials that try learning rates: for every task and encoding its first seed at each
    rate, with a fifth of the steps, tested at the training length only."""
    # A dict keeps the last entry of a key: reversed, the first seed; reversed again, in order.
    first_trials = {(trial.task, trial.encoding): trial for trial in reversed(trials)}
    return tuple(
        replace(
            trial,
            lr=trial.lr * factor,
            steps=max(1, trial.steps // RATE_STEPS_DIVISOR),
            test_lengths=(trial.train_length,),
            test_window=0,
            tune_steps=0,
        )
        for trial in reversed(first_trials.values())
        for factor in RATE_FACTORS
    )


def with_chosen_rates(study: Study, results: Sequence[TrialResult]) -> Study:
    """Return the study with its trials at the rates chosen from `results` of `rate_trials`, or at
    --lr if no rate could be trained."""
    checks = choose_rates(results)
    chosen_rates = {(check.task, check.encoding): check.chosen for check in checks}
    trials = tuple(
        replace(trial, lr=chosen_rates.get((trial.task, trial.encoding)) or trial.lr)
        for trial in study.trials
    )
    return replace(study, trials=trials, rates=checks)


def choose_rates(results: Sequence[TrialResult]) -> tuple[RateCheck, ...]:
    """Return, for every task and encoding of the results, the rates tried and the one with the
    lowest validation loss at the end of training, never one whose trial failed.

    Raises: ValueError for a trial that was tested beyond the training length.
    """
    tried: dict[tuple[str, str], list[RateTried]] = {}
    for result in results:
        config = result.config
        if config.test_lengths != (config.train_length,):
            raise ValueError(
                f"A learning rate is chosen at the training length {config.train_length} only, "
                f"but this trial was tested at {', '.join(map(str, config.test_lengths))}."
            )
        is_trained = result.reason is None and bool(result.training)
        bits = result.training[-1].valid if is_trained else None
        tried_rates = tried.setdefault((config.task, config.encoding), [])
        tried_rates.append(RateTried(config.lr, bits, result.reason))
    return tuple(
        RateCheck(task, encoding, tuple(tried_rates), _best_rate(tried_rates))
        for (task, encoding), tried_rates in tried.items()
    )


def _best_rate(rates: Sequence[RateTried]) -> float | None:
    """Return the rate with the lowest finite loss, or None if none has one."""
    known = [rate for rate in rates if rate.bits is not None and math.isfinite(rate.bits)]
    # `known` has no None; `or` tells this to the type checker.
    return min(known, key=lambda rate: rate.bits or 0.0).lr if known else None
