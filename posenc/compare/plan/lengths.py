"""Lengths of training and test windows, and the readings at the longest of them, from options."""

import itertools
from collections.abc import Sequence

from posenc.compare.defaults import MIN_TUNE_STEPS, TUNE_FRACTION
from posenc.compare.options import Options
from posenc.compare.trial.config import (
    CAUSAL,
    MIN_TRAIN_LENGTH,
    TrialConfig,
    undivided_length,
)

MAX_COMPILED_SHAPES = 8
"""Shapes of windows for which torch compiles one model. Those of more it would not compile, and say
so on its log only."""


def parse_train_lengths(options: Options, batch: int) -> tuple[int, ...]:
    """Return the lengths of training windows that --train-lengths names, ascending; () without it.

    batch: windows of a step, of the longest length.
    Raises: ValueError for an option that is no list of several whole numbers, and for lengths that
    do not divide the tokens of a step, or of which the longest is not --train-length.
    """
    option = options.train_lengths
    if option is None:
        return ()
    lengths = sorted(_whole_numbers("--train-lengths", option))
    if len(lengths) == 1:
        raise ValueError(
            f"--train-lengths names one length only, {option}. Name several, such as 32,64,128, or "
            f"give --train-length {option}."
        )
    for shorter, longer in itertools.pairwise(lengths):
        if shorter == longer:
            raise ValueError(
                f"--train-lengths names {longer} twice, and each is drawn as often as the others. "
                "Name each once."
            )
    shortest = lengths[0]
    longest = lengths[-1]
    if shortest < MIN_TRAIN_LENGTH:
        raise ValueError(
            f"--train-lengths: windows must have a length of {MIN_TRAIN_LENGTH} or more, got "
            f"{shortest}."
        )
    if options.train_length not in (None, longest):
        raise ValueError(
            f"--train-lengths: {longest} is the longest, and losses are judged at --train-length "
            f"{options.train_length}. Leave --train-length out, or let the longest be the same."
        )
    num_tokens = batch * longest
    undivided = undivided_length(lengths, num_tokens)
    if undivided is not None:
        raise ValueError(
            f"--train-lengths: windows of {undivided} do not fill a step of {num_tokens:,} exactly "
            f"({batch} times {longest}). Give lengths that divide it, or another --batch."
        )
    return tuple(lengths)


def check_shapes_to_compile(trial: TrialConfig) -> None:
    """Raise ValueError for a trial with --compile whose windows have more shapes than are compiled:
    with documents, or a last piece of a step that is smaller, a length has two."""
    if not trial.compile or not trial.train_lengths:
        return
    num_shapes = 0
    for length in trial.train_lengths:
        at_length = trial.at_length(length)
        has_smaller_piece = (
            at_length.micro_batch > 0 and at_length.batch % at_length.micro_batch > 0
        )
        num_shapes += 2 if has_smaller_piece else 1
    has_documents = trial.document_end is not None
    num_shapes *= 2 if has_documents else 1
    if num_shapes > MAX_COMPILED_SHAPES:
        raise ValueError(
            f"--compile: {len(trial.train_lengths)} --train-lengths are {num_shapes} shapes of "
            f"windows here, and at most {MAX_COMPILED_SHAPES} are compiled. Give fewer lengths, or "
            "leave out --compile."
        )


def _whole_numbers(option_name: str, option: str) -> list[int]:
    """Return the whole numbers of an option that are separated by commas. Raises: ValueError."""
    try:
        return [int(part) for part in option.split(",")]
    except ValueError:
        raise ValueError(
            f"{option_name} must be whole numbers separated by commas, got {option!r}."
        ) from None


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
    lengths = set(_whole_numbers("--test-lengths", option))
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
