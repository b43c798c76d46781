"""Read one window first: does the model know such text, and how long will all of it take?"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from posenc.command_line.progress import readable_duration
from posenc.extend.measure.evaluation import MAX_SHORT_TEXTS
from posenc.extend.measure.losses import LossReader
from posenc.hf.checkpoint.tokenization import Windows

UNREADABLE_LOSS = math.log(1000)
"""A model with a higher loss within its training length, in nats, does not know this text."""


@dataclass(frozen=True)
class FirstWindow:
    """Hold what the unchanged model did on the first window, cut to its training length.

    loss: mean, in nats per token. seconds_per_token: how long it took.
    """

    loss: float
    seconds_per_token: float


def read_first_window(reader: LossReader, windows: Windows, train_length: int) -> FirstWindow:
    """Read the first window up to the training length, and return what it took.

    Raises: NotFinite for losses that are NaN or infinite.
    """
    tokens = windows.tokens[:1, :train_length]
    reader.losses(tokens[:, : max(2, train_length // 8)])  # what is made once is not counted
    start_time = time.perf_counter()
    losses = reader.losses(tokens)
    seconds = time.perf_counter() - start_time
    return FirstWindow(float(losses.nanmean()), seconds / tokens.numel())


def refuse_unknown_text(first_window: FirstWindow, *, was_chosen: bool) -> None:
    """Raise ValueError if the model does not know the text. was_chosen: False for the text that is
    read without --text."""
    if first_window.loss <= UNREADABLE_LOSS:
        return
    perplexity = math.exp(min(first_window.loss, 50))  # the cap keeps exp() from overflowing
    advice = "Check that it is" if was_chosen else "Give --text with"
    raise ValueError(
        f"the model does not know this text: its perplexity is {perplexity:,.0f} on the first "
        f"window, within its training length. {advice} text like the model's own, or go on "
        "with --anyway."
    )


def tokens_to_read(
    num_windows: int, length: int, context_lengths: Sequence[int], train_length: int
) -> int:
    """Return about how many tokens are read to measure one method, without tasks: windows, the
    half of them again with less context, and short texts."""
    windows_with_less_context = (num_windows + 1) // 2 * sum(context_lengths)
    short_texts = min(MAX_SHORT_TEXTS, num_windows * (length // train_length)) * train_length
    return num_windows * length + windows_with_less_context + short_texts


def announcement(
    num_variants: int, tokens_of_each: int, other_tokens: int, first_window: FirstWindow
) -> str:
    """Return a sentence on the time of a run, from the first window. other_tokens: those of a
    search and a tuning, in units of reading."""
    tokens = num_variants * tokens_of_each + other_tokens
    seconds = tokens * first_window.seconds_per_token
    return (
        f"about {readable_duration(seconds)} without tasks, from the first window: "
        f"{num_variants} variants, {tokens:,} tokens"
    )
