"""Tune every encoding by one rule: the same first trials for each, and more where an edge wins.

A point is a learning rate and a setting of the encoding's own knob:

    encoding with its own tables    how much faster they learn (`encoding_lr`)
    RoPE, alone or in some layers   the base of its frequencies (`rope_theta`)
    ALiBi                           slopes as in the paper, steeper, or learned
    T5                              tables as fast, faster, or scores without the usual scale
    none of its own, as NoPE        nothing; it has more learning rates instead

Among the settings are those of other people's trainings: tables that learn at the model's own rate,
and the base of language models of today. The first points form a cross. All combinations would cost
more than they tell, as each trial needs MIN_SEARCH_STEPS: what is best after few steps is not what
is best after many.

                        half the rate
                              |
    two other settings -- usual setting, rate of all -- a third
                              |
                        twice the rate

Then comes the best rate of the one arm with the best setting of the other, and after it, where the
best point lies at an edge, its neighbours beyond: MAX_ROUNDS more rounds at most. Trials are
judged by validation data of the training length, so that longer tests have no influence.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

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
from posenc.compare.trial.config import ENCODING_LR, TrialConfig
from posenc.compare.trial.train import encoding_shape
from posenc.encodings import ModelShape, Option, Part, create, parse
from posenc.files.opening import read_file_text
from posenc.files.sealed_json import Record

MAX_ROUNDS = 4
"""Rounds of trials after that of the cross, at most."""
MIN_SEARCH_STEPS = 250
"""Steps of a trial that tunes, at least, if the study's own trials have as many: those of the
standard budget, which order encodings as twice as many do (see `BUDGETS`)."""
NUM_POINTS = 6
"""Points of the cross: three rates, and three more settings of the knob."""
MORE_RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Factors of the learning rate for an encoding without a knob: as many trials as the others."""
RATIOS = {"lr": 2.0, "encoding_lr": 4.0, "rope_theta": 10.0, "bias_max": 2.0}
"""Factor between neighbours on each axis, with which a search goes beyond an edge."""

CHOICES_FILE = Path(__file__).with_name("choices_standard_budget.json")
"""Choices of this search for the default recipe, written by experiments/equal_tuning.py."""
RECIPE_FIELDS = (
    "train_length",
    "train_lengths",
    "steps",
    "batch",
    "width",
    "layers",
    "heads",
    "kv_heads",
    "lr",
    "encoding_lr",
    "warmup",
    "schedule",
    "objective",
    "projections",
)
"""Fields of a trial that a recorded choice is for."""

KnobOptions = tuple[tuple[str, float | bool], ...]
"""Options that a knob adds to the text of an encoding."""


@dataclass(frozen=True)
class Point:
    """A point of an encoding's search.

    lr: the learning rate. encoding_lr: the learning rate of the encoding's tables, as a factor of
    lr. options: what the knob adds to the encoding's text.
    """

    lr: float
    encoding_lr: float
    options: KnobOptions = ()

    def value(self, axis: str) -> float | None:
        """Return the coordinate on an axis of RATIOS; None if the point's options do not set it, or
        set it to what is no number."""
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


class Setting(NamedTuple):
    """A setting of an encoding's knob: the options that it adds to the encoding's text, and the
    rate of its tables, as a factor of the model's."""

    options: KnobOptions
    encoding_lr: float


_SLOPES: tuple[KnobOptions, ...] = (
    (("bias_max", 8.0),),
    (("bias_max", 4.0),),
    (("learned", True),),
    (("learned", True),),
)
"""Settings of ALiBi: as in the paper, steeper, and learned, at two rates."""
_BASES: tuple[KnobOptions, ...] = tuple(
    (("rope_theta", base),) for base in (10_000.0, 1000.0, 100.0, 500_000.0)
)
"""Settings of RoPE: the paper's base, two lower ones, and that of Llama 3."""
_SCALES: tuple[KnobOptions, ...] = ((), (), (("unscaled", True),), ())
"""Settings of T5: its scores scaled or not."""


def settings_of_knob(text: str, trial: TrialConfig) -> list[Setting]:
    """Return the settings of an encoding's own knob, the usual one first and then three more; only
    the usual one for an encoding without a knob. Several knobs, of the parts of a hybrid, move
    together."""
    usual = trial.encoding_lr
    slower = usual / RATIOS["encoding_lr"]
    faster = usual * RATIOS["encoding_lr"]
    # The model's own rate; where that is one of the others, as with --encoding-lr 1, the default.
    one_rate = next(rate for rate in (1.0, ENCODING_LR) if rate not in (usual, slower, faster))
    keys = {key for part in parse(text).parts for key in _knob_keys(part)}
    knobs = []
    rates = [usual, usual, usual, usual]
    if "bias_max" in keys:
        knobs.append(_SLOPES)
        rates = [usual, usual, usual, one_rate]
    if "rope_theta" in keys:
        knobs.append(_BASES)
    if "unscaled" in keys:
        knobs.append(_SCALES)
        rates = [usual, faster, usual, one_rate]
    elif _has_tables(text, encoding_shape(trial)):
        rates = [usual, slower, faster, one_rate]
    elif not knobs:
        return [Setting((), usual)]
    settings = []
    for i, encoding_lr in enumerate(rates):
        options = sum((knob[i] for knob in knobs), ())
        settings.append(Setting(options, encoding_lr))
    return settings


def _knob_keys(part: Part) -> tuple[str, ...]:
    """Return the names of the options that the knob of one encoding sets. () if it has no knob, if
    the text gives one of these options itself, and for a class of the user."""
    if part.attribute:
        return ()
    given_keys = {option.key for option in part.options}
    keys = _KNOBS_BY_NAME.get(part.name_or_module)
    if keys is None:
        keys = ("rope_theta",) if _takes_a_base(str(part)) else ()
    return () if given_keys.intersection(keys) else keys


_KNOBS_BY_NAME = {"alibi": ("bias_max", "learned"), "t5": ("unscaled",)}
"""Options that the knob of an encoding sets, by its name."""


def first_points(text: str, trial: TrialConfig) -> list[Point]:
    """Return the NUM_POINTS points of an encoding that are tried first, around the rates of
    `trial`: that of all encodings, then other learning rates, then other settings of the knob."""
    usual, *other_settings = settings_of_knob(text, trial)
    factors = RATE_FACTORS if other_settings else MORE_RATE_FACTORS
    rates = [
        Point(_rounded(trial.lr * factor), usual.encoding_lr, usual.options) for factor in factors
    ]
    plain = rates.pop(factors.index(1.0))
    settings = [Point(plain.lr, other.encoding_lr, other.options) for other in other_settings]
    return [plain, *rates, *settings]


def joined_point(bits: Mapping[Point, float], plain: Point) -> Point:
    """Return the best setting of the knob with the best learning rate, each taken from the points
    that differ from `plain` in nothing else.

    bits: the losses of the points that could be trained.
    """
    rate_points = [point for point in bits if replace(point, lr=plain.lr) == plain]
    setting_points = [point for point in bits if point.lr == plain.lr]
    best_rate_point = min(rate_points, key=bits.__getitem__, default=plain)
    best_setting_point = min(setting_points, key=bits.__getitem__, default=plain)
    return replace(best_setting_point, lr=best_rate_point.lr)


def wider_points(tried: Iterable[Point], best: Point) -> list[Point]:
    """Return the next points outwards from the best one, on each axis on which nothing further out
    was tried with the same other coordinates; [] if it is at no edge.

    tried: the points so far.
    """
    tried = list(tried)
    points = []
    for axis in movable_axes(tried, best):
        points_on_line = [p for p in tried if _on_one_line(p, best, axis)]
        values = [p.value(axis) or 0.0 for p in points_on_line]
        if best.value(axis) == max(values):
            points.append(best.moved(axis, RATIOS[axis]))
        if best.value(axis) == min(values):
            points.append(best.moved(axis, 1 / RATIOS[axis]))
    return [point for point in points if point not in tried]


def edges_of(tried: Iterable[Point], best: Point) -> tuple[str, ...]:
    """Return the axes at whose edge the best point lies, in words."""
    points_beyond = wider_points(tried, best)
    return tuple(
        words
        for axis, words in _AXIS_WORDS.items()
        if any(point.value(axis) != best.value(axis) for point in points_beyond)
    )


def movable_axes(tried: Sequence[Point], best: Point) -> list[str]:
    """Return the axes on which `best` may move: those of RATIOS that it has a coordinate on.

    encoding_lr, the rate of tables, is one of them only where a table is trained: `best` learns its
    slopes, or points without learned slopes were tried at several encoding_lr.
    """
    learned_option = ("learned", True)
    encoding_rates = {point.encoding_lr for point in tried if learned_option not in point.options}
    has_tables = learned_option in best.options or len(encoding_rates) > 1
    axes = [axis for axis in RATIOS if best.value(axis) is not None]
    return [axis for axis in axes if axis != "encoding_lr" or has_tables]


_AXIS_WORDS = {
    "lr": "learning rate",
    "encoding_lr": "rate of tables",
    "rope_theta": "base",
    "bias_max": "slopes",
}
"""Axes of a search, in words for the page."""


def _on_one_line(point: Point, other: Point, axis: str) -> bool:
    """Return True if two points differ in no coordinate but that on the axis."""
    value, other_value = point.value(axis), other.value(axis)
    return (
        value is not None
        and other_value is not None
        and point.moved(axis, other_value / value) == other
    )


def _rounded(value: float) -> float:
    """Return a value rounded to six digits, so that two products that should be equal are."""
    return float(f"{value:.6g}")


def trial_at(point: Point, entry: ComparedEncoding, trial: TrialConfig) -> TrialConfig:
    """Return a trial of an encoding at a point of its search."""
    text = with_options(entry.text, point.options)
    return replace(
        trial,
        encoding=text,
        # Both are hashes of code: options added to the text choose no other classes.
        code=entry.user_code_hash,
        source=entry.posenc_code_hash,
        seed=0,
        lr=point.lr,
        encoding_lr=point.encoding_lr,
    )


def search_trial(trial: TrialConfig) -> TrialConfig:
    """Return the trial with a fraction of the steps, but at least MIN_SEARCH_STEPS if it has as
    many, tested at the training length only."""
    return replace(
        trial,
        steps=min(trial.steps, max(MIN_SEARCH_STEPS, trial.steps // RATE_STEPS_DIVISOR)),
        test_lengths=(trial.train_length,),
        test_window=0,
        tune_steps=0,
    )


def with_options(text: str, options: KnobOptions) -> str:
    """Return the text of an encoding with options added to those of its parts whose knobs they set;
    options that are the default stay out.

    >>> with_options("rope/nope every 4", (("rope_theta", 100.0),))
    'rope:rope_theta=100/nope every 4'
    """
    added_options = [Option(key, value) for key, value in options if _DEFAULTS.get(key) != value]
    if not added_options:
        return text
    spec = parse(text)
    layers = tuple(
        tuple(_part_with_options(part, added_options) for part in layer) for layer in spec.layers
    )
    return str(replace(spec, layers=layers))


def _part_with_options(part: Part, options: Sequence[Option]) -> Part:
    """Return one encoding of a text with those of the options added that its knob sets."""
    keys = _knob_keys(part)
    added_options = [option for option in options if option.key in keys]
    return replace(part, options=(*part.options, *added_options))


_DEFAULTS = {"rope_theta": 10000.0, "bias_max": 8.0, "learned": False, "unscaled": False}
"""Values of the options of knobs that a text need not name."""


@dataclass(frozen=True)
class RecordedChoices(Record):
    """Choices for one recipe, and how they were made.

    recipe: RECIPE_FIELDS of the trials, as text. made: when and how, in words.
    """

    recipe: dict[str, str]
    made: str
    checks: tuple[RateCheck, ...]

    def is_for(self, trial: TrialConfig) -> bool:
        """Return True if the trial is of this recipe."""
        return self.recipe == recipe_of(trial)


def recipe_of(trial: TrialConfig) -> dict[str, str]:
    """Return the fields of a trial that a recorded choice is for, as text."""
    return {name: str(getattr(trial, name)) for name in RECIPE_FIELDS}


def recorded_choices(
    trial: TrialConfig, entries: Sequence[ComparedEncoding]
) -> RecordedChoices | None:
    """Return the recorded choices for these encodings and a trial on posenc's own text; None for
    another recipe, and if one of the encodings, by its whole text, has no recorded choice."""
    if not CHOICES_FILE.exists():
        return None
    recorded = RecordedChoices.from_json(read_file_text(CHOICES_FILE))
    check_of = {check.encoding: check for check in recorded.checks}
    if not recorded.is_for(trial) or not all(entry.text in check_of for entry in entries):
        return None
    checks = tuple(replace(check_of[entry.text], encoding=entry.label) for entry in entries)
    return replace(recorded, checks=checks)


class Search:
    """The search for the best point of every encoding, a round of trials at a time.

    entries: the compared encodings. trial: the recipe, with the rates that the points surround.
    """

    def __init__(self, entries: Sequence[ComparedEncoding], trial: TrialConfig) -> None:
        self._entries = entries
        self._trial = trial
        self._points = {entry.label: first_points(entry.text, trial) for entry in entries}
        self._plain_points = {label: points[0] for label, points in self._points.items()}
        self._round = 0

    @property
    def trials(self) -> tuple[TrialConfig, ...]:
        """Return the trials of all points so far."""
        return tuple(
            search_trial(trial_at(point, entry, self._trial))
            for entry in self._entries
            for point in self._points[entry.label]
        )

    def widen(self, results: Mapping[TrialConfig, TrialResult]) -> bool:
        """Add points to the search of each encoding, and return True if any were added.

        In the first round, that is the point with the best learning rate and the best setting of
        the knob. In later rounds, or where that point was tried before, it is the next point
        outwards on each axis at whose edge the best point lies. An encoding without a finished
        trial gets none. After MAX_ROUNDS rounds nothing is added.

        results: of the trials so far; a trial without one counts as failed.
        """
        if self._round == MAX_ROUNDS:
            return False
        self._round += 1
        is_wider = False
        for entry in self._entries:
            points = self._points[entry.label]
            bits_by_point = self._bits(entry, results)
            known_bits = {point: loss for point, loss in bits_by_point.items() if loss is not None}
            if not known_bits:
                continue
            new_points = [joined_point(known_bits, self._plain_points[entry.label])]
            if self._round > 1 or new_points[0] in points:
                new_points = wider_points(points, min(known_bits, key=known_bits.__getitem__))
            points += new_points
            is_wider = is_wider or bool(new_points)
        return is_wider

    def _bits(
        self, entry: ComparedEncoding, results: Mapping[TrialConfig, TrialResult]
    ) -> dict[Point, float | None]:
        """Return the validation loss of each point of an encoding; None for a failure."""
        bits_by_point: dict[Point, float | None] = {}
        for point in self._points[entry.label]:
            result = results.get(search_trial(trial_at(point, entry, self._trial)))
            is_trained = result is not None and result.reason is None and bool(result.training)
            bits_by_point[point] = result.training[-1].valid if result and is_trained else None
        return bits_by_point

    def checks(self, results: Mapping[TrialConfig, TrialResult]) -> tuple[RateCheck, ...]:
        """Return what was tried for each encoding, and the choice."""
        checks = []
        for entry in self._entries:
            bits_by_point = self._bits(entry, results)
            tried = tuple(
                RateTried(
                    point.lr,
                    loss,
                    None if loss is not None else "it has no finite loss",
                    with_options(entry.text, point.options),
                    point.encoding_lr,
                )
                for point, loss in bits_by_point.items()
            )
            plain_at = self._points[entry.label].index(self._plain_points[entry.label])
            steps = search_trial(self._trial).steps
            check = RateCheck.of_search(self._trial.task, entry.label, tried, plain_at, steps)
            if check.chosen_at is not None:
                check = replace(
                    check, edges=edges_of(bits_by_point, [*bits_by_point][check.chosen_at])
                )
            checks.append(check)
        return tuple(checks)


def with_choices(
    study: Study, checks: Sequence[RateCheck], entries: Sequence[ComparedEncoding]
) -> Study:
    """Return the study whose trials have the chosen rates and settings, and whose labels name the
    settings: `rope (base 100)`. An encoding without a choice keeps its own. Seconds of a step that
    were measured with another setting are left out."""
    check_by_label = {check.encoding: check for check in checks}
    entry_by_text = {entry.text: entry for entry in entries}
    new_labels = {}
    labels = dict(study.labels)
    trials = []
    for trial in study.trials:
        entry = entry_by_text[trial.encoding]
        check = check_by_label.get(entry.label)
        if check is None or check.best is None:
            trials.append(trial)
            continue
        best = check.best
        text = best.encoding or entry.text
        new_labels[entry.label] = label_with_setting(entry, text)
        if text != new_labels[entry.label]:
            labels[text] = new_labels[entry.label]
        trials.append(replace(trial, encoding=text, lr=best.lr, encoding_lr=best.encoding_lr))
    used_texts = {trial.encoding for trial in trials}
    labels = {text: label for text, label in labels.items() if text in used_texts}
    step_seconds = {t: seconds for t, seconds in study.step_seconds.items() if t in used_texts}
    relabelled_checks = tuple(
        replace(check, encoding=new_labels.get(check.encoding, check.encoding)) for check in checks
    )
    return replace(
        study,
        trials=tuple(trials),
        labels=labels,
        rates=relabelled_checks,
        step_seconds=step_seconds,
    )


_SETTING_WORDS = {
    "rope_theta": "base {:g}",
    "bias_max": "slopes down to 2^-{:g}",
    "learned": "learned slopes",
    "unscaled": "unscaled",
}
"""An option that a knob sets, in words for the name of a row."""


def label_with_setting(entry: ComparedEncoding, text: str) -> str:
    """Return the label of an encoding with the options that a search added to its text.

    >>> label_with_setting(ComparedEncoding("rope", "rope", ""), "rope:rope_theta=100")
    'rope (base 100)'
    """
    stated_options = {option for part in parse(entry.text).parts for option in part.options}
    added_values = {
        option.key: option.value
        for part in parse(text).parts
        for option in part.options
        if option not in stated_options
    }
    if not added_values:
        return entry.label
    settings_in_words = [_SETTING_WORDS[key].format(value) for key, value in added_values.items()]
    return f"{entry.label} ({', '.join(settings_in_words)})"


def _has_tables(text: str, shape: ModelShape) -> bool:
    """Return True if the encoding has parameters outside linear layers, which learn at the rate of
    tables."""
    encoding = create(text, shape)
    ids_in_linear = {
        id(p) for m in encoding.modules() if isinstance(m, nn.Linear) for p in m.parameters()
    }
    return any(id(p) not in ids_in_linear for p in encoding.parameters())


@lru_cache
def _takes_a_base(text: str) -> bool:
    """Return True if an encoding accepts the option rope_theta, its text does not give it, and it
    has no tables of its own."""
    shape = ModelShape(embed_dim=128, num_heads=4, train_length=16)  # any sizes do
    spec = parse(text)
    (part,) = spec.parts
    if any(option.key == "rope_theta" for option in part.options):
        return False
    part_with_base = replace(part, options=(*part.options, Option("rope_theta", 100.0)))
    try:
        return not _has_tables(str(part_with_base), shape)
    except (ValueError, TypeError):
        return False
