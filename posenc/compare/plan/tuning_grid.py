"""Tune every encoding with the same effort: one grid of equally many trials for each.

A point of the grid is a learning rate and a setting of the encoding's own knob:

    encoding with its own tables    how much faster they learn (`encoding_lr`)
    RoPE, alone or in some layers   the base of its frequencies (`rope_theta`)
    ALiBi                           slopes as in the paper, steeper, or learned
    T5                              tables as fast, faster, or scores without the usual scale
    none of its own, as NoPE        nothing; it has more learning rates instead

Every trial has a fraction of the steps and is judged by validation data of the training length, so
that longer tests have no influence. If the best point lies at an edge of the grid, the grid grows
there, at most MAX_ROUNDS times.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from posenc.compare.plan.encodings import ComparedEncoding
from posenc.compare.results import (
    RATE_FACTORS,
    RATE_STEPS_DIVISOR,
    RateCheck,
    RateTried,
    Study,
    TrialResult,
)
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.train import encoding_shape
from posenc.encodings import create, hash_of_posenc_code, parse
from posenc.files.opening import text_of
from posenc.files.sealed_json import Record

MAX_ROUNDS = 3
"""Rounds in which a grid whose edge wins grows, at most."""
SETTINGS = 3
"""Settings of a knob in the grid; with three learning rates nine trials."""
MORE_RATE_FACTORS = tuple(2 ** (k / 2) for k in range(-4, 5))
"""Factors of the learning rate for an encoding without a knob: as many trials as the others."""
RATIOS = {"lr": 2.0, "encoding_lr": 4.0, "rope_theta": 10.0, "bias_max": 2.0}
"""Factor between neighbours on each axis of a grid, with which it grows."""

CHOICES = Path(__file__).with_name("choices_standard_budget.json")
"""Choices of this grid for the default recipe, written by experiments/equal_tuning.py."""
RECIPE_FIELDS = (
    "train_length",
    "steps",
    "batch",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "lr",
    "encoding_lr",
    "objective",
    "projections",
)
"""Fields of a trial that a recorded choice is for."""

Options = tuple[tuple[str, object], ...]
"""Options that a knob adds to the text of an encoding."""


@dataclass(frozen=True)
class Point:
    """A point of an encoding's grid. options: what the knob adds to its text."""

    lr: float
    encoding_lr: float
    options: Options = ()

    def value(self, axis: str) -> float | None:
        """Return the coordinate on an axis of RATIOS; None if the point does not lie on it."""
        if axis in ("lr", "encoding_lr"):
            return getattr(self, axis)
        value = dict(self.options).get(axis)
        return float(value) if isinstance(value, int | float) else None

    def moved(self, axis: str, factor: float) -> "Point":
        """Return the point whose coordinate on the axis is multiplied by the factor."""
        value = self.value(axis)
        assert value is not None
        new_value = _rounded(value * factor)
        if axis in ("lr", "encoding_lr"):
            return replace(self, **{axis: new_value})
        options = tuple((key, new_value if key == axis else old) for key, old in self.options)
        return replace(self, options=options)


def settings_of_knob(text: str, trial: TrialConfig) -> list[tuple[Options, float]]:
    """Return the settings of an encoding's own knob in the grid: options for its text, and the rate
    of its tables; one setting for an encoding without a knob."""
    fixed = {option.key for part in parse(text).parts for option in part.options}
    parts = parse(text).parts
    name = parts[0].where if len(parts) == 1 and not parts[0].attribute else ""
    middle = trial.encoding_lr
    if name == "alibi" and not fixed & {"learned", "bias_max"}:
        return [
            ((("bias_max", 8.0),), middle),
            ((("bias_max", 4.0),), middle),
            ((("learned", True),), middle),
        ]
    if name == "t5" and "unscaled" not in fixed:
        return [((), middle), ((), middle * RATIOS["encoding_lr"]), ((("unscaled", True),), middle)]
    if _has_tables(text, trial):
        ratio = RATIOS["encoding_lr"]
        return [((), middle / ratio), ((), middle), ((), middle * ratio)]
    if name and "rope_theta" not in fixed and _takes_a_base(text, trial):
        return [((("rope_theta", base),), middle) for base in (100.0, 1000.0, 10000.0)]
    return [((), middle)]


def grid_of(text: str, trial: TrialConfig) -> list[Point]:
    """Return the points of an encoding's grid around the rates of `trial`."""
    settings = settings_of_knob(text, trial)
    factors = RATE_FACTORS if len(settings) == SETTINGS else MORE_RATE_FACTORS
    return [
        Point(_rounded(trial.lr * factor), encoding_lr, options)
        for options, encoding_lr in settings
        for factor in factors
    ]


def plain_point(text: str, trial: TrialConfig) -> Point:
    """Return the point of an encoding's grid with the rates of `trial` and the usual setting."""
    for point in grid_of(text, trial):
        rates_are_those_of_all = (point.lr, point.encoding_lr) == (
            _rounded(trial.lr),
            trial.encoding_lr,
        )
        if rates_are_those_of_all and with_options(text, point.options) == text:
            return point
    raise AssertionError(f"the grid of {text} lacks the rates of the recipe")


def wider_points(tried: Iterable[Point], best: Point) -> list[Point]:
    """Return the neighbours of the best point beyond what was tried, on every axis: where no point
    of the line through it, along that axis, lies further out. [] if it lies inside.

    tried: the points so far.
    """
    tried = list(tried)
    points = []
    for axis in axes_of(tried, best):
        line = [p for p in tried if _on_one_line(p, best, axis)]
        values = [p.value(axis) or 0.0 for p in line]
        if best.value(axis) == max(values):
            points.append(best.moved(axis, RATIOS[axis]))
        if best.value(axis) == min(values):
            points.append(best.moved(axis, 1 / RATIOS[axis]))
    return [point for point in points if point not in tried]


def edges_of(tried: Iterable[Point], best: Point) -> tuple[str, ...]:
    """Return the axes at whose edge the best point lies, in words."""
    beyond = wider_points(tried, best)
    return tuple(
        words
        for axis, words in _AXIS_WORDS.items()
        if any(point.value(axis) != best.value(axis) for point in beyond)
    )


def axes_of(tried: Sequence[Point], best: Point) -> list[str]:
    """Return the axes of the grid through a point: the rate of tables is one where some point has
    another, or where slopes are learned."""
    has_tables = len({p.encoding_lr for p in tried}) > 1 or ("learned", True) in best.options
    axes = [axis for axis in RATIOS if best.value(axis) is not None]
    return [axis for axis in axes if axis != "encoding_lr" or has_tables]


_AXIS_WORDS = {
    "lr": "learning rate",
    "encoding_lr": "rate of tables",
    "rope_theta": "base",
    "bias_max": "slopes",
}
"""Axes of grids, in words for the page."""


def _on_one_line(point: Point, other: Point, axis: str) -> bool:
    """Return True if two points differ in no coordinate but that on the axis."""
    value, there = point.value(axis), other.value(axis)
    return value is not None and there is not None and point.moved(axis, there / value) == other


def _rounded(value: float) -> float:
    """Return a value without the rounding of products, so that equal points are equal."""
    return float(f"{value:.6g}")


def trial_at(point: Point, entry: ComparedEncoding, trial: TrialConfig) -> TrialConfig:
    """Return a trial of an encoding at a point of its grid."""
    text = with_options(entry.text, point.options)
    source = entry.source if text == entry.text else hash_of_posenc_code(text)
    return replace(
        trial,
        encoding=text,
        code=entry.code,
        source=source,
        seed=0,
        lr=point.lr,
        encoding_lr=point.encoding_lr,
    )


def short_trial(trial: TrialConfig) -> TrialConfig:
    """Return the trial with a fraction of the steps, tested at the training length only."""
    return replace(
        trial,
        steps=max(1, trial.steps // RATE_STEPS_DIVISOR),
        test_lengths=(trial.train_length,),
        test_window=0,
        tune_steps=0,
    )


def with_options(text: str, options: Options) -> str:
    """Return the text of one encoding with options added; those that are the default stay out.

    >>> with_options("rope", (("rope_theta", 100.0),))
    'rope:rope_theta=100'
    """
    added = {key: value for key, value in options if _DEFAULTS.get(key) != value}
    if not added:
        return text
    pairs = ",".join(f"{key}={_format(value)}" for key, value in added.items())
    has_options = bool(parse(text).parts[0].options)
    return str(parse(f"{text}{',' if has_options else ':'}{pairs}"))


_DEFAULTS = {"rope_theta": 10000.0, "bias_max": 8.0, "learned": False, "unscaled": False}
"""Values of the options of knobs that a text need not name."""


def _format(value: object) -> str:
    """Return an option's value as the grammar of encodings writes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


@dataclass(frozen=True)
class RecordedChoices(Record):
    """Choices for one recipe, and how they were made.

    recipe: RECIPE_FIELDS of the trials, as text. made: when and how, in words.
    """

    recipe: dict[str, str]
    made: str
    checks: tuple[RateCheck, ...]

    def fit(self, trial: TrialConfig) -> bool:
        """Return True if the trial is of this recipe."""
        return self.recipe == recipe_of(trial)


def recipe_of(trial: TrialConfig) -> dict[str, str]:
    """Return the fields of a trial that a recorded choice is for, as text."""
    return {name: str(getattr(trial, name)) for name in RECIPE_FIELDS}


def recorded_choices(
    trial: TrialConfig, entries: Sequence[ComparedEncoding]
) -> RecordedChoices | None:
    """Return the recorded choices for these encodings and a trial on posenc's own text; None for
    another recipe, and unless each of the encodings, with the settings of its name, has one."""
    if not CHOICES.exists():
        return None
    recorded = RecordedChoices.from_json(text_of(CHOICES))
    check_of = {check.encoding: check for check in recorded.checks}
    if not recorded.fit(trial) or not all(entry.text in check_of for entry in entries):
        return None
    checks = tuple(replace(check_of[entry.text], encoding=entry.label) for entry in entries)
    return replace(recorded, checks=checks)


class Search:
    """The search for the best point of every encoding, a round of trials at a time.

    entries: the compared encodings. trial: the recipe, with the rates that the grid surrounds.
    """

    def __init__(self, entries: Sequence[ComparedEncoding], trial: TrialConfig) -> None:
        self._entries = entries
        self._trial = trial
        self._points = {entry.label: grid_of(entry.text, trial) for entry in entries}
        self._round = 0

    @property
    def trials(self) -> tuple[TrialConfig, ...]:
        """Return the trials of all points so far."""
        return tuple(
            short_trial(trial_at(point, entry, self._trial))
            for entry in self._entries
            for point in self._points[entry.label]
        )

    def widen(self, results: Mapping[TrialConfig, TrialResult]) -> bool:
        """Add points beyond each edge that won; return True if any were added."""
        if self._round == MAX_ROUNDS:
            return False
        self._round += 1
        is_wider = False
        for entry in self._entries:
            bits = self._bits(entry, results)
            known = {point: loss for point, loss in bits.items() if loss is not None}
            if known:
                more = wider_points(bits, min(known, key=known.__getitem__))
                self._points[entry.label] += more
                is_wider = is_wider or bool(more)
        return is_wider

    def _bits(
        self, entry: ComparedEncoding, results: Mapping[TrialConfig, TrialResult]
    ) -> dict[Point, float | None]:
        """Return the validation loss of each point of an encoding; None for a failure."""
        bits: dict[Point, float | None] = {}
        for point in self._points[entry.label]:
            result = results.get(short_trial(trial_at(point, entry, self._trial)))
            is_trained = result is not None and result.reason is None and bool(result.training)
            bits[point] = result.training[-1].valid if result and is_trained else None
        return bits

    def checks(self, results: Mapping[TrialConfig, TrialResult]) -> tuple[RateCheck, ...]:
        """Return what was tried for each encoding, and the choice."""
        checks = []
        for entry in self._entries:
            bits = self._bits(entry, results)
            tried = tuple(
                RateTried(
                    point.lr,
                    loss,
                    None if loss is not None else "it has no finite loss",
                    with_options(entry.text, point.options),
                    point.encoding_lr,
                )
                for point, loss in bits.items()
            )
            plain_at = [*bits].index(plain_point(entry.text, self._trial))
            check = RateCheck.of_grid(self._trial.task, entry.label, tried, plain_at)
            if check.chosen_at is not None:
                check = replace(check, edges=edges_of(bits, [*bits][check.chosen_at]))
            checks.append(check)
        return tuple(checks)


def with_choices(
    study: Study, checks: Sequence[RateCheck], entries: Sequence[ComparedEncoding]
) -> Study:
    """Return the study whose trials have the chosen rates and settings. An encoding without a
    choice keeps its own."""
    by_label = {check.encoding: check for check in checks}
    entry_by_text = {entry.text: entry for entry in entries}
    labels = dict(study.labels)
    trials = []
    for trial in study.trials:
        entry = entry_by_text[trial.encoding]
        check = by_label.get(entry.label)
        if check is None or check.best is None:
            trials.append(trial)
            continue
        best = check.best
        text = best.encoding or entry.text
        source = trial.source if text == entry.text else hash_of_posenc_code(text)
        if text != entry.label:
            labels[text] = entry.label
        trials.append(
            replace(trial, encoding=text, source=source, lr=best.lr, encoding_lr=best.encoding_lr)
        )
    used = {trial.encoding for trial in trials}
    labels = {text: label for text, label in labels.items() if text in used}
    return replace(study, trials=tuple(trials), labels=labels, rates=tuple(checks))


def _has_tables(text: str, trial: TrialConfig) -> bool:
    """Return True if the encoding has parameters outside linear layers, which learn at the rate of
    tables."""
    encoding = create(text, encoding_shape(trial))
    in_linear = {
        id(p) for m in encoding.modules() if isinstance(m, nn.Linear) for p in m.parameters()
    }
    return any(id(p) not in in_linear for p in encoding.parameters())


def _takes_a_base(text: str, trial: TrialConfig) -> bool:
    """Return True if the encoding rotates with a base that its text may name."""
    try:
        create(with_options(text, (("rope_theta", 100.0),)), encoding_shape(trial))
    except (ValueError, TypeError):
        return False
    return True
