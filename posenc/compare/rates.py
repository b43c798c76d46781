"""Choose learning rates by the trials that tried them, and say which order the choices turn."""

import math
from collections.abc import Sequence

from posenc.compare.results import RateCheck, RateTried, TrialResult


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
        rates = tried.setdefault((config.task, config.encoding), [])
        rates.append(RateTried(config.lr, bits, result.reason))
    return tuple(
        RateCheck(task, encoding, tuple(rates), _best_rate(rates))
        for (task, encoding), rates in tried.items()
    )


def _best_rate(rates: Sequence[RateTried]) -> float | None:
    """Return the rate with the lowest finite loss, or None if none has one."""
    known = [rate for rate in rates if rate.bits is not None and math.isfinite(rate.bits)]
    # `known` has no None; `or` tells this to the type checker.
    return min(known, key=lambda rate: rate.bits or 0.0).lr if known else None


def pairs_turned_by_tuning(
    checks: Sequence[RateCheck], margin: float = 0.0
) -> list[tuple[str, str]]:
    """Return the pairs (a, b) in which `a` is ahead after tuning alike and `b` with one rate and
    the usual settings for all, both by more than `margin` bits, among the trials of a search."""
    losses = {}
    for check in checks:
        tuned = None if check.best is None else check.best.bits
        if check.plain_bits is not None and tuned is not None:
            losses[check.encoding] = (tuned, check.plain_bits)
    return [
        (a, b)
        for a in losses
        for b in losses
        if losses[b][0] - losses[a][0] > margin and losses[a][1] - losses[b][1] > margin
    ]
