"""Tell apart the variants of a checkpoint that take different memory to read."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

from posenc.extend.methods import METHODS
from posenc.extend.options import Options
from posenc.extend.variants import NUM_SEARCH_WINDOWS, WINDOW, WINDOW_IN_CONFIG, needs_search
from posenc.hf import learned_tables
from posenc.hf.checkpoint.loading import Checkpoint
from posenc.hf.sliding_window import why_no_window, window_in_every_layer


class Reading(NamedTuple):
    """Describe variants that take the same memory to measure.

    names: of the variants, for the name of their stage; empty for the unchanged model and all that
        are read like it.
    length, num_windows: tokens of the longest windows that they read, and how many there are.
    applied: takes the model, and returns a context manager in which it has their shapes.
    in_one_piece: True if no text is read in pieces through the cache.
    cache_length: the most tokens in the cache; None for all of a text.
    """

    names: tuple[str, ...]
    length: int
    num_windows: int
    applied: Callable[[Any], AbstractContextManager[Any]] = nullcontext
    in_one_piece: bool = False
    cache_length: int | None = None


def readings_of(
    checkpoint: Checkpoint, target_length: int, method: str | None, options: Options
) -> list[Reading]:
    """Return the ways in which the unchanged model, `method` (None: every method) and the last
    tokens only are read. Most methods change numbers and no shape, so that one way is for all of
    them; and the last tokens are fewer than those of the unchanged model."""
    train_length = checkpoint.trained_length
    if not checkpoint.rope_settings:
        # The unchanged table has rows for so many tokens: longer windows are cut.
        num_short_windows = options.windows * (target_length // train_length)
        readings = [Reading((), train_length, num_short_windows)]
        table_methods = tuple(name for name in learned_tables.METHODS if method in (None, name))
        if table_methods:
            lengthen = shapes_of_method(checkpoint, table_methods[0], target_length)
            readings.append(Reading(table_methods, target_length, options.windows, lengthen))
        return readings
    num_windows = options.windows
    if needs_search(method, options):
        num_windows = max(num_windows, NUM_SEARCH_WINDOWS)
    readings = [Reading((), target_length, num_windows)]
    cache_unsafe_methods = tuple(
        name for name in METHODS if method in (None, name) and not METHODS[name].cache_safe
    )
    if cache_unsafe_methods:
        readings.append(
            Reading(cache_unsafe_methods, target_length, options.windows, in_one_piece=True)
        )
    if method in (None, WINDOW) and why_no_window(checkpoint) is None:
        set_window = shapes_of_method(checkpoint, WINDOW, target_length)
        readings.append(
            Reading(
                (WINDOW_IN_CONFIG,),
                target_length,
                options.windows,
                set_window,
                cache_length=train_length,
            )
        )
    return readings


def shapes_of_method(
    checkpoint: Checkpoint, method: str | None, target_length: int
) -> Callable[[Any], AbstractContextManager[Any]]:
    """Return a function that takes the model, and returns a context manager in which its tensors
    have the shapes that they have with `method`; None is the method that the command chooses."""
    if not checkpoint.rope_settings and method is None:
        method = next(iter(learned_tables.METHODS))  # all lengthen the table alike
    if method in learned_tables.METHODS:
        return partial(learned_tables.lengthened_table, method=method, length=target_length)
    if method == WINDOW:
        return partial(
            window_in_every_layer,
            window_len=checkpoint.trained_length,
            max_positions=target_length,
        )
    return nullcontext
