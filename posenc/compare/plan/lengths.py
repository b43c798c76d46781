"""Lengths of training and test windows, and the readings at the longest of them, from options."""

from collections.abc import Sequence

from posenc.compare.defaults import MIN_TUNE_STEPS, TUNE_FRACTION
from posenc.compare.options import Options
from posenc.compare.trial.config import CAUSAL


def parse_test_lengths(
    option: str | None, train_length: int, factors: Sequence[int]
) -> tuple[int, ...]:
    """Return the test lengths that --test-lengths names, with the training length, in order;
    without the option that length times each factor.

    Raises: ValueError for an option that is no list of whole numbers, or lengths below
    `train_length`.
    """
    if option is None:
        return tuple(train_length * factor for factor in factors)
    try:
        lengths = {int(part) for part in option.split(",")}
    except ValueError:
        raise ValueError(
            f"--test-lengths must be whole numbers separated by commas, got {option!r}."
        ) from None
    if min(lengths) < train_length:
        raise ValueError(
            f"--test-lengths: {min(lengths)} is below --train-length {train_length}. "
            "Test at the training length and beyond."
        )
    return tuple(sorted(lengths | {train_length}))


def steps_of_tuning(options: Options, lengths: Sequence[int], steps: int) -> int:
    """Return the steps of the tuning before the reading "tuned"; 0 for no such reading.

    By default it is the larger of MIN_TUNE_STEPS and TUNE_FRACTION of `steps`, or 0 where no test
    length is above the training length, and for another objective than CAUSAL.

    lengths: the training length, then the longer test lengths. steps: of the training.
    Raises: ValueError if steps are asked for where the default is 0.
    """
    nothing_is_longer = len(lengths) == 1
    if options.tune_steps is None:
        if options.objective != CAUSAL or nothing_is_longer:
            return 0
        return max(MIN_TUNE_STEPS, round(TUNE_FRACTION * steps))
    if options.tune_steps and options.objective != CAUSAL:
        raise ValueError(
            f"--tune-steps: extend tunes decoders, and --objective {options.objective} trains "
            "none. Leave it out, or give 0."
        )
    if options.tune_steps and nothing_is_longer:
        raise ValueError(
            f"--tune-steps {options.tune_steps} would tune at the training length itself. Give "
            "longer --test-lengths, or --tune-steps 0."
        )
    return options.tune_steps


def width_of_test_window(options: Options, train_length: int, lengths: Sequence[int]) -> int:
    """Return the width of attention in the reading "window", by default the training length; 0 for
    no such reading, as where attention has no order or nothing is longer than in training.

    Raises: ValueError for a window that hides nothing, or of an objective that has none.
    """
    if options.test_window is None:
        is_shorter = options.objective == CAUSAL and train_length < max(lengths)
        return train_length if is_shorter else 0
    if options.test_window and options.objective != CAUSAL:
        raise ValueError(
            f"--test-window: --objective {options.objective} reads whole windows from both sides; "
            "a window of past bytes is for --objective causal. Leave it out."
        )
    is_on_bytes = options.tokenizer is None and options.tokens is None
    if options.test_window >= max(lengths):
        raise ValueError(
            f"--test-window {options.test_window} hides nothing in tests of up to "
            f"{max(lengths)} {'bytes' if is_on_bytes else 'tokens'}. Give a smaller window, or "
            "longer --test-lengths."
        )
    return options.test_window
