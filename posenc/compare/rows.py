"""Rows of a study: one for each encoding, reading and seed."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from posenc.compare.results import (
    FarScore,
    LengthScore,
    Study,
    TrainingPoint,
    TrialResult,
    kept_by_study,
)
from posenc.compare.trial.config import TrialConfig

_NAME_FORMATS = {"trained": "{}", "window": "{} in a window", "tuned": "{} tuned"}
"""The name of a row by its reading, with the encoding's name."""


@dataclass(frozen=True)
class Row:
    """One encoding in one reading with one seed, as far as it was measured; only finished trials
    have rows.

    encoding: the text of the encoding, or its label in a study `with_labels`.
    reading: one of READINGS.
    score_by_length: mean bits per byte over the windows of that length.
    far_by_length: beyond the training length only; {} in results from before it was kept.
    by_context: losses of the far targets of the longest windows with less context than in training;
        () in results from before it was kept, and after a tuning.
    seconds: training on one worker, the tuning included; None if not kept.
    steps_per_second: of the training at the training length; None if not kept.
    settings: every factor used: those of the encoding, "lr" and "encoding_lr".
    curve: validation losses while training at the training length, before any tuning.
    """

    encoding: str
    reading: str
    seed: int
    score_by_length: Mapping[int, LengthScore]
    far_by_length: Mapping[int, FarScore]
    by_context: tuple[LengthScore, ...]
    seconds: float | None
    steps_per_second: float | None
    parameters: int
    settings: Mapping[str, str]
    curve: tuple[TrainingPoint, ...]
    trial: TrialConfig

    @property
    def name(self) -> str:
        """Return the name of the row without its seed: `rope in a window`."""
        return row_name(self.encoding, self.reading)

    @property
    def trained_seconds(self) -> float:
        """Return the seconds of the training alone, without a tuning."""
        assert self.steps_per_second is not None
        return _known_steps(self.trial) / self.steps_per_second

    @property
    def near(self) -> LengthScore:
        """Return the score at the training length."""
        return self.score_by_length[self.trial.train_length]


def row_name(encoding: str, reading: str) -> str:
    """Return the name of the rows of an encoding in a reading.

    >>> row_name("rope", "window")
    'rope in a window'
    """
    return _NAME_FORMATS[reading].format(encoding)


def plain_name(encoding: str) -> str:
    """Return the name of an encoding from its text, which has options after a colon, or from its
    label, which has settings in brackets.

    >>> plain_name("rope:rope_theta=100"), plain_name("rope (base 100)")
    ('rope', 'rope')
    """
    return re.split(r":| \(", encoding)[0]


@kept_by_study
def rows_of(study: Study) -> tuple[Row, ...]:
    """Return the rows of the finished trials on text, in the order of the trials; of each trial
    first as trained, then its other readings that are defined."""
    rows: list[Row] = []
    for result in study.finished:
        if not result.config.is_on_text:
            continue
        # Old results, which have no far targets, measured their losses by context on other bytes.
        by_context = result.by_context if result.far else ()
        rows.append(_row(result, "trained", result.by_length, result.far, by_context))
        for reading in result.readings:
            if reading.cannot is not None:
                continue
            # Bytes with less context than a window of at least the training length are read in it
            # as without it.
            sees_the_same = (
                reading.name == "window" and result.config.test_window >= result.config.train_length
            )
            contexts = by_context if sees_the_same else ()
            rows.append(_row(result, reading.name, reading.by_length, reading.far, contexts))
    return tuple(rows)


@kept_by_study
def rows_by_name(study: Study) -> dict[str, list[Row]]:
    """Return the rows of a study by name, those of all seeds together."""
    rows_of_name: dict[str, list[Row]] = {}
    for row in rows_of(study):
        rows_of_name.setdefault(row.name, []).append(row)
    return rows_of_name


class CostRatio(NamedTuple):
    """Hold how many times as long the training steps of one encoding take as those of another.

    lowest, highest: bounds of the ratio. Steps that were measured in turns give the range of their
    ratios, which holds the median in 97 % of measurements with six turns; trials, which other work
    on the machine slowed at different times, give the largest range that their seeds allow.
    """

    estimate: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class EqualTime:
    """The encodings of a study after equally long training, as measured here.

    step_seconds: by encoding, seconds of training steps: measured in turns if `in_turns`, otherwise
        the mean of each trial.
    seconds: training time of the fastest encoding for all its steps.
    losses: by encoding and seed, bits per byte on validation text after `seconds`, from the curve
        of its training. A slower encoding is then not at the end of its steps, and where rates fall
        its rate has not fallen: a schedule for its number of steps would give it a lower loss.
    loss_ranges: by encoding and seed, the lowest and the highest loss that `losses` may have, as
        the cost of the encoding is known only within CostRatio's bounds. An encoding that may not
        have been validated after `seconds` is left out.
    """

    step_seconds: Mapping[str, Sequence[float]]
    in_turns: bool
    seconds: float
    losses: Mapping[str, Mapping[int, float]]
    loss_ranges: Mapping[str, Mapping[int, tuple[float, float]]]

    @property
    def costs(self) -> dict[str, float]:
        """Return the seconds of a step by encoding, as multiples of the cheapest one's."""
        cheapest = self.cheapest
        return {name: self.ratio(name, cheapest).estimate for name in self.step_seconds}

    def known_ratio(self, encoding: str, other: str) -> CostRatio | None:
        """Return how many times as long an encoding trains as `other`; None if it is unknown."""
        if encoding not in self.step_seconds or other not in self.step_seconds:
            return None
        return self.ratio(encoding, other)

    def ratio(self, encoding: str, other: str) -> CostRatio:
        """Return the seconds of a step of `encoding` divided by those of `other`. Both must have
        been measured."""
        own_seconds = self.step_seconds[encoding]
        other_seconds = self.step_seconds[other]
        if encoding == other:
            return CostRatio(1.0, 1.0, 1.0)
        if self.in_turns:
            ratios = [a / b for a, b in zip(own_seconds, other_seconds, strict=True)]
            return CostRatio(median(ratios), min(ratios), max(ratios))
        lowest = min(own_seconds) / max(other_seconds)
        highest = max(own_seconds) / min(other_seconds)
        return CostRatio(median(own_seconds) / median(other_seconds), lowest, highest)

    @property
    def cheapest(self) -> str:
        """Return the encoding whose steps take the least time."""
        return min(self.step_seconds, key=lambda name: median(self.step_seconds[name]))

    def is_ahead(self, encoding: str, other: str, margin: float) -> bool:
        """Return True if an encoding has the lower loss at equal time for certain: with every seed
        of both, at both bounds of both costs, and by more than `margin` bits. Nothing is certain if
        one of the two lacks a seed of the other."""
        own_ranges = self.loss_ranges.get(encoding, {})
        other_ranges = self.loss_ranges.get(other, {})
        if not own_ranges or own_ranges.keys() != other_ranges.keys():
            return False
        # Even the worst loss of the one, by its bounds, is below the best of the other.
        return all(own_ranges[seed][1] + margin < other_ranges[seed][0] for seed in own_ranges)

    @property
    def mean_losses(self) -> dict[str, float]:
        """Return the mean losses of the encodings that have one, lowest first."""
        mean_by_encoding = {
            name: fmean(loss_by_seed.values()) for name, loss_by_seed in self.losses.items()
        }
        return dict(sorted(mean_by_encoding.items(), key=lambda item: item[1]))


@kept_by_study
def at_equal_time(study: Study) -> EqualTime | None:
    """Return the encodings of a study on text after equally long training; None if the time of one
    is unknown, or was measured on different processors. Without curves there are no losses."""
    results = [result for result in study.finished if result.config.is_on_text]
    if not results:
        return None
    encodings = {result.config.encoding for result in results}
    in_turns = encodings <= study.step_seconds.keys()
    if in_turns:
        step_seconds = {encoding: study.step_seconds[encoding] for encoding in encodings}
    else:
        step_seconds = _step_seconds_of_trials(results)
    if step_seconds is None:
        return None
    without_losses = EqualTime(step_seconds, in_turns, 0.0, {}, {})
    cheapest = without_losses.cheapest
    least_steps = min(_known_steps(result.config) for result in results)
    losses: dict[str, dict[int, float]] = {}
    loss_ranges: dict[str, dict[int, tuple[float, float]]] = {}
    for result in results:
        encoding = result.config.encoding
        cost_ratio = without_losses.ratio(encoding, cheapest)
        loss, loss_at_lowest, loss_at_highest = (
            _valid_loss_at(result.training, least_steps / ratio)
            for ratio in (cost_ratio.estimate, cost_ratio.lowest, cost_ratio.highest)
        )
        if loss is not None:
            losses.setdefault(encoding, {})[result.config.seed] = loss
        if loss_at_lowest is not None and loss_at_highest is not None:
            bounds = min(loss_at_lowest, loss_at_highest), max(loss_at_lowest, loss_at_highest)
            loss_ranges.setdefault(encoding, {})[result.config.seed] = bounds
    seconds = least_steps * median(step_seconds[cheapest])
    return replace(without_losses, seconds=seconds, losses=losses, loss_ranges=loss_ranges)


def _known_steps(trial: TrialConfig) -> int:
    """Return the steps of a trial. Where a table of losses does not have them, the whole training
    counts as one."""
    return trial.steps or 1


def _step_seconds_of_trials(results: Sequence[TrialResult]) -> dict[str, list[float]] | None:
    """Return the mean seconds of a step of each trial, by encoding; None if a time is missing, or
    trials ran on different processors."""
    processors = set()
    seconds_by_encoding: dict[str, list[float]] = {}
    for result in results:
        timing = result.timing
        if timing is None or not timing.train_seconds > 0:
            return None
        processors.add(timing.processor)
        seconds_per_step = timing.train_seconds / _known_steps(result.config)
        seconds_by_encoding.setdefault(result.config.encoding, []).append(seconds_per_step)
    return seconds_by_encoding if len(processors) == 1 else None


def _valid_loss_at(curve: Sequence[TrainingPoint], step: float) -> float | None:
    """Return the validation loss after a step that may lie between two points of the curve, on a
    straight line over the logarithm of the steps; None before its first point, and without one."""
    if not curve:
        return None
    if step >= curve[-1].step:
        return curve[-1].valid
    for before, after in pairwise(curve):
        if before.step <= step < after.step:
            share = math.log(step / before.step) / math.log(after.step / before.step)
            return before.valid + share * (after.valid - before.valid)
    return None


def _row(
    result: TrialResult,
    reading: str,
    by_length: tuple[LengthScore, ...],
    far: tuple[FarScore, ...],
    by_context: tuple[LengthScore, ...],
) -> Row:
    """Return the row of a trial in one reading, with its scores."""
    config = result.config
    seconds = None
    steps_per_second = None
    if result.timing is not None and result.timing.train_seconds > 0:
        steps_per_second = _known_steps(config) / result.timing.train_seconds
        seconds = result.timing.train_seconds
        if reading == "tuned":
            seconds += result.timing.tuning_seconds
    learning_rates = {"lr": f"{config.lr:g}", "encoding_lr": f"{config.encoding_lr:g}"}
    return Row(
        config.encoding,
        reading,
        config.seed,
        {score.length: score for score in by_length},
        {score.length: score for score in far},
        by_context,
        seconds,
        steps_per_second,
        result.parameters,
        result.spec | learning_rates,
        result.training,
        config,
    )
