"""Rows of a study: one for each encoding, reading and seed."""

from collections.abc import Mapping
from dataclasses import dataclass

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
