"""How many bytes of context a row uses: the same bytes at the end of longer and longer windows.

Far bytes are the last train_length bytes of each long window. A model reads them

    with little context: at most an eighth, a quarter and half of train_length bytes before each
    with near context:   at most train_length bytes before each
    in a window of L:    from L - train_length to L bytes before each, for each tested length L

With little and with near context each byte has at least half of what it has at most. A loss that
falls from one of these to a longer one shows that bytes are used which only the longer
one has. What lies between two tested lengths was not measured, so the answer is a range:
`more than 64 and at most 256 bytes`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import fmean

from posenc.compare.judging.standing import MARGIN
from posenc.compare.results import FarScore, LengthScore, Study, TrialResult
from posenc.compare.rows import Row
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.objectives import objective_of
from posenc.statistics.seed_intervals import Gap
from posenc.statistics.text_intervals import window_gaps

_LossesByLength = dict[int, list[tuple[float, ...]]]
"""By length of the window that ends in the far bytes, with the training length for near context:
for each seed, bits per byte of the far bytes of every window."""


@dataclass(frozen=True)
class ContextUse:
    """The context that a row uses, in bytes.

    more_than: it uses more than these for certain: a longer window saves more than MARGIN, outside
        the 95 % interval over windows of the text and with every seed. 0 if none does, and for
        models that are not causal.
    at_most: more context than these saves less than MARGIN for certain; None if that is open, or
        only the longest window is so.
    near_length, longest_length: the training length, and the length of the longest windows.
    saved: bits per byte that `longest_length` saves against `near_length`, on the same bytes;
        negative if it costs. Its half-width is over windows of the text; inf without at least eight
        windows.
    """

    more_than: int
    at_most: int | None
    near_length: int
    longest_length: int
    saved: Gap


def context_use(rows: Sequence[Row]) -> ContextUse | None:
    """Return the context that a row uses; None if the row cannot run in the longest windows, or its
    far bytes were not measured.

    rows: the row with each seed.
    """
    trial = rows[0].trial
    longest_length = max(trial.test_lengths)
    longest_scores = [
        row.far_by_length[longest_length] for row in rows if longest_length in row.far_by_length
    ]
    saved_by_seed = [
        score.far_near - score.far
        for score in longest_scores
        if score.far is not None and score.far_near is not None
    ]
    if len(saved_by_seed) < len(rows):
        return None
    losses = _losses_of_the_same_bytes(rows, longest_scores)
    gaps = _savings(tuple((length, tuple(of_seeds)) for length, of_seeds in losses.items()))
    lengths = sorted(losses)
    half_width = math.inf
    if (trial.train_length, longest_length) in gaps:
        half_width = gaps[trial.train_length, longest_length].half_width
    return ContextUse(
        more_than=_bytes_used_for_certain(lengths, losses, gaps, trial),
        at_most=_length_enough_for_certain(lengths, gaps),
        near_length=trial.train_length,
        longest_length=longest_length,
        saved=Gap(fmean(saved_by_seed), half_width),
    )


def _losses_of_the_same_bytes(
    rows: Sequence[Row], longest_scores: Sequence[FarScore]
) -> _LossesByLength:
    """Return the losses of the far bytes of the longest windows at all lengths at which the same
    bytes were read. longest_scores: the scores of the longest windows, for each seed."""
    train_length = rows[0].trial.train_length
    losses = _losses_with_little_context(rows)
    losses[train_length] = [score.near_windows for score in longest_scores]
    for length in rows[0].far_by_length:
        scores = [row.far_by_length[length] for row in rows if length in row.far_by_length]
        # Where a text is too short, the longest windows end at other places than shorter ones, and
        # their far bytes are others. The same bytes have the same losses with near context.
        are_same_bytes = [score.near_windows for score in scores] == losses[train_length]
        if are_same_bytes and all(score.far is not None for score in scores):
            losses[length] = [score.windows for score in scores]
    return losses


def _losses_with_little_context(rows: Sequence[Row]) -> _LossesByLength:
    """Return the losses of the far bytes with less context than in training, by its length; of
    lengths that every seed was measured at."""
    losses_by_length: _LossesByLength = {}
    for row in rows:
        for score in row.by_context:
            if score.windows:
                losses_by_length.setdefault(score.length, []).append(score.windows)
    return {
        length: losses for length, losses in losses_by_length.items() if len(losses) == len(rows)
    }


@lru_cache(maxsize=10_000)  # a page asks for each row several times
def _savings(
    losses: tuple[tuple[int, tuple[tuple[float, ...], ...]], ...],
) -> Mapping[tuple[int, int], Gap]:
    """Return what the longer of each two windows (shorter, longer) saves, in bits per byte, with
    intervals over the windows of the text that hold for all pairs together; {} without them.

    losses: the items of _LossesByLength.
    """
    means: dict[str, list[float]] = {}
    for length, losses_by_seed in losses:
        if len({len(losses_of_seed) for losses_of_seed in losses_by_seed}) != 1:
            return {}
        means[str(length)] = [
            fmean(losses_of_window) for losses_of_window in zip(*losses_by_seed, strict=True)
        ]
    gaps = window_gaps(means)
    shorter_and_longer = combinations(sorted(length for length, _ in losses), 2)
    return {(a, b): gaps[str(a), str(b)] for a, b in shorter_and_longer if (str(a), str(b)) in gaps}


def _bytes_used_for_certain(
    lengths: Sequence[int],
    losses: _LossesByLength,
    gaps: Mapping[tuple[int, int], Gap],
    trial: TrialConfig,
) -> int:
    """Return a number of bytes of context that are certainly not all that the row uses. Of the
    windows that a longer one certainly improves on, it takes the longest, and returns the bytes of
    context of the far byte that has the fewest there; 0 if there is no such window."""
    if trial.objective != CAUSAL:
        return 0
    most_bytes = 0
    for i, length in enumerate(lengths):
        for longer in lengths[i + 1 :]:
            are_better = [
                _saves_for_certain(gaps.get((shorter, longer)), losses[shorter], losses[longer])
                for shorter in lengths[: i + 1]
            ]
            if all(are_better):
                most_bytes = _least_context(length, trial)
    return most_bytes


def _saves_for_certain(
    gap: Gap | None,
    shorter_losses: Sequence[Sequence[float]],
    longer_losses: Sequence[Sequence[float]],
) -> bool:
    """Return True if the longer of two windows saves more than MARGIN, outside the interval `gap`
    and with every seed. shorter_losses, longer_losses: by seed and window."""
    if gap is None or not (gap.significant and gap.value > MARGIN):
        return False
    return all(
        fmean(longer_loss) < fmean(shorter_loss)
        for shorter_loss, longer_loss in zip(shorter_losses, longer_losses, strict=True)
    )


def _least_context(length: int, trial: TrialConfig) -> int:
    """Return the bytes of context of the far byte that has the fewest, in windows of a length; up
    to the training length with that much context."""
    if length > trial.train_length:
        return length - trial.train_length
    # Each piece of the far bytes stands at the end of its own window of that length.
    piece_length = -(-length // objective_of(trial).num_near_pieces)  # rounded up
    return length - piece_length


def _length_enough_for_certain(
    lengths: Sequence[int], gaps: Mapping[tuple[int, int], Gap]
) -> int | None:
    """Return the shortest window, below the longest, that is certainly long enough: each longer
    one saves less than MARGIN bits against it, even at the upper end of the interval. None if no
    window is, as where a gap is unknown or its interval too wide.

    lengths: of the windows, the shortest first. gaps: by (length, longer length), the bits that the
        longer window saves.
    """
    for i, length in enumerate(lengths[:-1]):
        gaps_over_this = [gaps.get((length, longer)) for longer in lengths[i + 1 :]]
        if all(gap is not None and gap.value + gap.half_width < MARGIN for gap in gaps_over_this):
            return length
    return None


def far_by_context(
    far: Mapping[int, FarScore], by_context: Sequence[LengthScore], train_length: int
) -> dict[int, float]:
    """Return the losses of far bytes by length of the window that ends in them; at the training
    length those with near context only, below it those with less. A length that cannot run is left
    out."""
    losses = {length: score.far for length, score in far.items() if score.far is not None}
    for score in by_context:
        if score.bits_per_byte is not None:
            losses[score.length] = score.bits_per_byte
    near_losses = [score.far_near for score in far.values() if score.far_near is not None]
    if near_losses:
        losses[train_length] = near_losses[-1]
    return dict(sorted(losses.items()))


def losses_by_context(result: TrialResult) -> dict[int, float]:
    """Return the losses of a trial's far bytes by length of the window that ends in them, see
    `far_by_context`; of an old result, its losses by context."""
    if not result.far:
        return {
            context_score.length: context_score.bits_per_byte
            for context_score in result.by_context
            if context_score.bits_per_byte
        }
    far_scores = {score.length: score for score in result.far}
    return far_by_context(far_scores, result.by_context, result.config.train_length)


def context_gains(study: Study, encoding: str) -> tuple[int, list[float]] | None:
    """Return the longest context, and for each seed the bits per byte it saves on the same bytes
    against context of the training length; None if not measured. Old results have it too."""
    train_length = study.trials[0].train_length
    contexts_and_gains = []
    for result in study.finished:
        if result.config.encoding != encoding:
            continue
        losses = losses_by_context(result)
        longest_context = max(losses, default=0)
        if train_length not in losses or longest_context <= train_length:
            return None
        contexts_and_gains.append((longest_context, losses[train_length] - losses[longest_context]))
    longest_contexts = {context for context, _ in contexts_and_gains}
    if len(longest_contexts) != 1:  # none, or seeds of different tests
        return None
    return contexts_and_gains[0][0], [gain for _, gain in contexts_and_gains]
