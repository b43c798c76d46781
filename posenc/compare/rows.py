"""Rows of a study: one for each encoding, reading and seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from posenc.compare.results import FarScore, LengthScore, Study, TrainingPoint, TrialResult
from posenc.compare.trial.config import TrialConfig

_NAMES = {"trained": "{}", "window": "{} in a window", "tuned": "{} tuned"}
"""The name of a row by its reading, with the encoding's name."""


@dataclass(frozen=True)
class Row:
    """One encoding in one reading with one seed, as far as it was measured; only finished trials
    have rows.

    encoding: the text of the encoding, or its label in a study `with_labels`.
    reading: one of READINGS.
    loss: by length, mean bits per byte over the windows of that length.
    far: by length, beyond the training length only; {} in results from before it was kept.
    seconds: training on one worker, the tuning included; None if not kept.
    steps_per_second: of the training at the training length; None if not kept.
    settings: every factor used: those of the encoding, "lr" and "encoding_lr".
    curve: validation losses while training at the training length, before any tuning.
    """

    encoding: str
    reading: str
    seed: int
    loss: Mapping[int, LengthScore]
    far: Mapping[int, FarScore]
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
        return self.trial.steps / self.steps_per_second

    @property
    def near(self) -> LengthScore:
        """Return the score at the training length."""
        return self.loss[self.trial.train_length]


def row_name(encoding: str, reading: str) -> str:
    """Return the name of the rows of an encoding in a reading.

    >>> row_name("rope", "window")
    'rope in a window'
    """
    return _NAMES[reading].format(encoding)


def rows_of(study: Study) -> tuple[Row, ...]:
    """Return the rows of the finished trials on text, in the order of the trials; of each trial
    first as trained, then its other readings that are defined."""
    rows: list[Row] = []
    for result in study.finished:
        if not result.config.is_on_text:
            continue
        rows.append(_row(result, "trained", result.by_length, result.far))
        for reading in result.readings:
            if reading.cannot is None:
                rows.append(_row(result, reading.name, reading.by_length, reading.far))
    return tuple(rows)


def rows_by_name(study: Study) -> dict[str, list[Row]]:
    """Return the rows of a study by name, those of all seeds together."""
    by_name: dict[str, list[Row]] = {}
    for row in rows_of(study):
        by_name.setdefault(row.name, []).append(row)
    return by_name


@dataclass(frozen=True)
class EqualTime:
    """The encodings of a study after equally long training, as measured here.

    seconds: training time of the fastest encoding for all its steps.
    costs: by encoding, seconds of a step as a multiple of those of the cheapest one; medians over
        seeds.
    losses: by encoding and seed, bits per byte on validation text after `seconds`, from the curve
        of its training. A slower encoding is then not at the end of its steps, and its learning
        rate has not fallen: a schedule for its number of steps would give it a lower loss.
    """

    seconds: float
    costs: Mapping[str, float]
    losses: Mapping[str, Mapping[int, float]]

    def times(self, encoding: str, other: str) -> float | None:
        """Return how many times the training time of `other` an encoding takes; None if unknown."""
        if encoding not in self.costs or other not in self.costs:
            return None
        return self.costs[encoding] / self.costs[other]

    @property
    def cheapest(self) -> str:
        """Return the encoding whose steps take the least time."""
        return min(self.costs, key=lambda name: self.costs[name])

    @property
    def order(self) -> dict[str, float]:
        """Return the mean losses of the encodings that have one, lowest first."""
        means = {name: fmean(seeds.values()) for name, seeds in self.losses.items()}
        return dict(sorted(means.items(), key=lambda item: item[1]))


def at_equal_time(study: Study) -> EqualTime | None:
    """Return the encodings of a study on text after equally long training; None if the time of one
    was not measured, or trials ran on different processors."""
    results = [result for result in study.finished if result.config.is_on_text]
    processors = set()
    seconds_per_step: dict[str, list[float]] = {}
    for result in results:
        timing = result.timing
        if timing is None or not timing.train_seconds > 0 or not result.training:
            return None
        processors.add(timing.processor)
        seconds = timing.train_seconds / result.config.steps
        seconds_per_step.setdefault(result.config.encoding, []).append(seconds)
    if len(processors) != 1:
        return None
    medians = {name: median(seconds) for name, seconds in seconds_per_step.items()}
    cheapest = min(medians.values())
    steps = min(result.config.steps for result in results)
    losses: dict[str, dict[int, float]] = {}
    for result in results:
        name = result.config.encoding
        step = steps * cheapest / medians[name]
        bits = _valid_at(result.training, step)
        if bits is not None:
            losses.setdefault(name, {})[result.config.seed] = bits
    costs = {name: seconds / cheapest for name, seconds in medians.items()}
    return EqualTime(steps * cheapest, costs, losses)


def _valid_at(curve: Sequence[TrainingPoint], step: float) -> float | None:
    """Return the validation loss after a step that may lie between two points of the curve, on a
    straight line over the logarithm of the steps; None before its first point."""
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
) -> Row:
    """Return the row of a trial in one reading, with its scores."""
    config = result.config
    seconds = None
    steps_per_second = None
    if result.timing is not None and result.timing.train_seconds > 0:
        steps_per_second = config.steps / result.timing.train_seconds
        seconds = result.timing.train_seconds
        if reading == "tuned":
            seconds += result.timing.tuning_seconds
    factors = {"lr": f"{config.lr:g}", "encoding_lr": f"{config.encoding_lr:g}"}
    return Row(
        config.encoding,
        reading,
        config.seed,
        {score.length: score for score in by_length},
        {score.length: score for score in far},
        seconds,
        steps_per_second,
        result.parameters,
        result.spec | factors,
        result.training,
        config,
    )
