"""Results of a study and its trials: frozen dataclasses that are written to JSON and read back.

A trial trains once and is read in several ways; posenc.compare.rows makes a row of each:

    Row = (encoding, reading, seed), reading in scores.READINGS = ("trained", "window", "tuned")
    Row.score_by_length[L]  LengthScore: mean bits per byte over windows of L
    Row.near                the same where L is train_length
    Row.far_by_length[L]    FarScore, L > train_length: the last train_length tokens of each window
        .far                their bits per byte with all L tokens of the window
        .far_near           the same tokens, with at most train_length tokens of context
        .windows, .near_windows     both in each window, for intervals over the text
    Row.seconds, .steps_per_second, .parameters, .settings, .curve

A result of a recipe below 7 has no `far` and no `readings`: its rows are "trained" only, and
`Row.far_by_length` is {}. A length that an encoding cannot run has None; `cannot` says why.

{"sha256": "9c...",                             of everything below; every record on disk has it
 "format": "posenc study 2", "command": "posenc compare rope learned --steps 500",
 "started": "2026-01-31T12:00:00+00:00", "versions": {"posenc": "0.1.0", "torch": "2.13.0", ...},
 "hardware": {"processor": "...", "cores": "2", "precision": "float32", "workers": "2"},
 "corpus": {"name": "Python 3.11.9 standard library", "hash": "0f...", "num_files": 700, ...},
 "trials": [<TrialConfig>, ...],                 every trial that was planned
 "results": [
   {"config": <TrialConfig>, "reason": null,
    "parameters": 853000, "encoding_parameters": 0,
    "spec": {"name": "rope", "class": "RoPE", "places": "2", "rope_theta": "10000.0", ...},
    "training": [{"step": 25, "train": 3.9, "valid": 3.8}, {"step": 50, ...}],
    "by_length": [{"length": 128, "bits_per_byte": 2.19, "cannot": null, "windows": [2.1, ...]},
                  {"length": 256, "bits_per_byte": null, "cannot": "has 128 positions"}],
    "by_position": [{"start": 0, "stop": 16, "bits_per_byte": 3.1}, ...],
    "far": [{"length": 256, "far": 2.3, "far_near": 2.2, "cannot": null,
             "windows": [2.4, ...], "near_windows": [2.3, ...]}, ...],
    "readings": [{"name": "window", "by_length": [...], "far": [...], "cannot": null}, ...],
    "timing": {"tokens_per_second": 12000.0, "train_seconds": 160.0, "test_seconds": 9.0}},
   {"config": {...}, "reason": "loss became nan at step 40", ...}],   one that failed
 "summary": [{"encoding": "rope", "parameters": 853000, "num_seeds": 2, "reach": 128,
              "by_length": [{"length": 128, "mean": 2.19, "spread": 0.01}], ...}],
 "recommendation": "Use rope: ...", "limits": "Two seeds, ..."}
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from posenc.compare.scores import CaseScore, FarScore, LengthScore, PositionScore, Reading
from posenc.compare.sources import CorpusInfo, GivenTable
from posenc.compare.trial.config import (
    ENCODING_LR,
    MAX_ENTRIES,
    TrialConfig,
    check_encoding_name,
)
from posenc.files.sealed_json import (
    MAX_LETTERS,
    Record,
    check_count,
    check_rising,
    check_text_length,
)

FORMAT = "posenc study 2"
MAX_STUDY_BYTES = 1 << 30
"""Bytes of the largest study.json that is read: chosen. One of 2,000 trials has 150 MB."""

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TrainingPoint(Record):
    """Bits per byte, or per target of a task, after `step` steps: `train` is the mean over steps
    since the last point, None if it is not known, `valid` is on validation text or held-out
    sequences like those of training."""

    step: int
    train: float | None
    valid: float

    def check(self) -> None:
        check_count("step", self.step, 1)
        for loss in (self.train, self.valid):
            if loss is not None and not loss >= 0:
                raise ValueError(f"expected a loss of 0 or more, got {loss:g}.")


@dataclass(frozen=True)
class Timing(Record):
    """Wall-clock cost of a trial on one worker, the names of its CPU and GPU, and the folder of the
    run that trained it, if it was reused. tuning_seconds: of the reading "tuned".
    tokens_per_second: 0 if it is not known."""

    tokens_per_second: float
    train_seconds: float
    test_seconds: float
    processor: str = ""
    reused_from: str = ""
    tuning_seconds: float = 0.0

    def check(self) -> None:
        for name in ("tokens_per_second", "train_seconds", "test_seconds", "tuning_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name):g}.")
        check_text_length("processor", self.processor, MAX_ENTRIES)


@dataclass(frozen=True)
class TrialResult(Record):
    """The result of one trial; `reason` is why it failed, or None.

    by_length: losses over non-overlapping windows of each test length.
    by_position: losses by position inside the longest window that the encoding can run.
    far: losses of the last train_length targets of each longer window; () in old results.
    readings: scores of the same weights read in other ways; () in old results.
    by_context: losses of the far targets of the longest windows, read with less context than the
        training length: `length` tokens at most, and half of that at least. In old results without
        `far`, losses of the last train_length // 2 bytes of each longest window, at the end of
        windows of growing length.
    spec: all settings of the encoding in this trial.
    by_case: scores of every test of a task, the training length first.
    """

    config: TrialConfig
    reason: str | None = None
    parameters: int = 0
    encoding_parameters: int = 0
    spec: dict[str, str] = field(default_factory=dict)
    training: tuple[TrainingPoint, ...] = ()
    by_length: tuple[LengthScore, ...] = ()
    by_position: tuple[PositionScore, ...] = ()
    by_context: tuple[LengthScore, ...] = ()
    timing: Timing | None = None
    by_case: tuple[CaseScore, ...] = ()
    far: tuple[FarScore, ...] = ()
    readings: tuple[Reading, ...] = ()

    def check(self) -> None:
        """Raise ValueError for other tests than the config has, or impossible numbers."""
        check_count("parameters", self.parameters)
        check_count("encoding_parameters", self.encoding_parameters)
        for key, value in self.spec.items():
            check_text_length("spec", key, MAX_ENTRIES)
            check_text_length(f"spec[{key!r}]", value, MAX_LETTERS)
        check_rising("steps of the training curve", [p.step for p in self.training], MAX_ENTRIES)
        if self.training and self.training[-1].step > self.config.steps:
            raise ValueError(f"the training curve goes beyond {self.config.steps} steps.")
        check_rising("lengths of contexts", [s.length for s in self.by_context], MAX_ENTRIES)
        check_rising("lengths of far targets", [s.length for s in self.far], MAX_ENTRIES)
        _check_unique("reading", [reading.name for reading in self.readings])
        for reading in self.readings:
            reading.check_begins_at(self.config.test_lengths[0])
        check_rising("positions", [p.start for p in self.by_position], MAX_ENTRIES)
        for before, after in itertools.pairwise(self.by_position):
            check_rising("positions", [before.stop - 1, after.start], MAX_ENTRIES)
        self._check_scores()

    def _check_scores(self) -> None:
        """Raise ValueError unless there is a score of each test length, of text or of cases."""
        if self.config.is_on_text:
            has_others = bool(self.by_case)
            keys = [(score.length, "") for score in self.by_length]
        else:
            has_others = bool(self.by_length)
            keys = [(score.length, score.variant) for score in self.by_case]
        _check_unique("score", keys)
        expected = self.config.test_lengths
        got = tuple(dict.fromkeys(length for length, _ in keys))
        is_incomplete = got != expected and self.reason is None
        if has_others or is_incomplete:
            raise ValueError(
                f"expected scores at {_join_lengths(expected)}, its training length first, "
                f"got {_join_lengths(got)}"
            )


@dataclass(frozen=True)
class LengthSummary(Record):
    """Bits per byte at one window length, over seeds.

    mean: None if the encoding cannot run there. spread: half the distance between the best and the
    worst seed. cannot: why the encoding cannot run there; None if it can.
    """

    length: int
    mean: float | None
    spread: float | None
    cannot: str | None = None


@dataclass(frozen=True)
class EncodingSummary(Record):
    """One row of the table; only finished trials count.

    reach: extrapolation length, the longest tested length up to which the mean is within 5 % of
    that at the training length; None if there is none at the training length.
    """

    encoding: str
    parameters: int
    num_seeds: int
    by_length: tuple[LengthSummary, ...]
    reach: int | None
    tokens_per_second: float | None


@dataclass(frozen=True)
class CaseSummary(Record):
    """One cell of a task's table: the task's metric at one case.

    mean: over the seeds, learned or not; None if the encoding cannot run.
    seeds: scores of all seeds; empty if the encoding cannot run.
    cannot: why it cannot run; None if it can.
    """

    length: int
    variant: str
    mean: float | None
    seeds: tuple[float, ...]
    cannot: str | None = None


@dataclass(frozen=True)
class TaskSummary(Record):
    """One row of a task's table; only finished trials count.

    learned: number of seeds that learned the task, see posenc.compare.judging.summary.
    """

    task: str
    encoding: str
    parameters: int
    num_seeds: int
    learned: int
    cases: tuple[CaseSummary, ...]


RATE_FACTORS = (0.5, 1.0, 2.0)
"""What --search-lr multiplies --lr by: the rates that it tries."""
RATE_STEPS_DIVISOR = 5
"""A rate is chosen by trials of a fifth of the steps. Chosen, not derived."""


@dataclass(frozen=True)
class RateTried(Record):
    """A learning rate that was tried, and its trial's loss on validation data, in bits per byte or,
    for a task, per target; or why the trial failed.

    encoding: text of the encoding with the setting that was tried; "" for the compared one.
    encoding_lr: learning rate of its tables, in multiples of `lr`.
    """

    lr: float
    bits: float | None
    reason: str | None = None
    encoding: str = ""
    encoding_lr: float = ENCODING_LR

    def check(self) -> None:
        for name in ("lr", "encoding_lr"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name):g}.")


@dataclass(frozen=True)
class RateCheck(Record):
    """The learning rates tried for an encoding on a task, and the chosen one; see
    posenc.compare.plan.learning_rate_search, and for a search of rates and settings
    posenc.compare.plan.equal_tuning.

    chosen_at: index of the choice in `tried`; None for the first that has the rate `chosen`.
    plain_at: index in `tried` of the point before any tuning: the rates of the recipe and the
        encoding's usual setting; None if only rates were tried.
    edges: axes of the search at whose edge the choice lies, beyond which a better one may be.
    steps: of each trial; 0 for 1 / RATE_STEPS_DIVISOR of the steps of the study.
    """

    task: str
    encoding: str
    tried: tuple[RateTried, ...]
    chosen: float | None
    chosen_at: int | None = None
    plain_at: int | None = None
    edges: tuple[str, ...] = ()
    steps: int = 0

    @classmethod
    def of_search(
        cls,
        task: str,
        encoding: str,
        tried: tuple[RateTried, ...],
        plain_at: int,
        steps: int = 0,
    ) -> Self:
        """Return the check of a search, whose choice is the lowest finite loss."""
        bits_by_index = {i: each.bits for i, each in enumerate(tried) if each.bits is not None}
        bits_by_index = {i: bits for i, bits in bits_by_index.items() if math.isfinite(bits)}
        if not bits_by_index:
            return cls(task, encoding, tried, None, None, plain_at, steps=steps)
        best_index = min(bits_by_index, key=bits_by_index.__getitem__)
        return cls(task, encoding, tried, tried[best_index].lr, best_index, plain_at, steps=steps)

    @property
    def best(self) -> RateTried | None:
        """Return what was chosen; None if nothing could be trained."""
        if self.chosen_at is not None:
            return self.tried[self.chosen_at]
        return next((each for each in self.tried if each.lr == self.chosen), None)

    @property
    def plain_bits(self) -> float | None:
        """Return the loss with the rates of all and the usual setting; None if not tried."""
        return None if self.plain_at is None else self.tried[self.plain_at].bits

    @property
    def one_rate_bits(self) -> float | None:
        """Return the loss with the usual setting and one learning rate for all parameters, that of
        the recipe; None if not tried. Without tables of its own an encoding has just one rate, and
        of its usual setting nothing else was tried."""
        if self.plain_at is None:
            return None
        plain = self.tried[self.plain_at]
        with_usual_setting = [each for each in self.tried if each.encoding == plain.encoding]
        if all(each.encoding_lr == plain.encoding_lr for each in with_usual_setting):
            return plain.bits
        for tried in with_usual_setting:
            if (tried.lr, tried.encoding_lr) == (plain.lr, 1.0):
                return tried.bits
        return None

    def steps_tried(self, steps_of_study: int) -> int:
        """Return the steps of each trial of the search. steps_of_study: those of the trials after
        it."""
        return self.steps or max(1, steps_of_study // RATE_STEPS_DIVISOR)

    def check(self) -> None:
        check_count("steps", self.steps)
        if len(self.tried) < len(RATE_FACTORS):
            raise ValueError(
                f"expected {len(RATE_FACTORS)} rates that were tried, got {len(self.tried)}."
            )
        for index in (self.chosen_at, self.plain_at):
            if index is not None and not 0 <= index < len(self.tried):
                raise ValueError(f"number {index} is none of {len(self.tried)} that were tried.")
        if self.chosen is not None and (self.best is None or self.best.lr != self.chosen):
            raise ValueError(f"the chosen rate {self.chosen:g} was not tried.")


class OtherFormat(ValueError):
    """The study was written by another version of posenc."""


def kept_by_study(
    compute: Callable[Concatenate["Study", Rest], Result],
) -> Callable[Concatenate["Study", Rest], Result]:
    """Decorate a function of a study, and of further arguments that can be hashed, so that each
    study computes it once: a study never changes, and a page asks dozens of times who is first.
    The value must not be changed by those who get it."""

    @functools.wraps(compute)
    def keep(study: "Study", *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        kept_values = vars(study).setdefault("_kept_values", {})
        key = (compute, args, tuple(kwargs.items()))
        if key not in kept_values:
            kept_values[key] = compute(study, *args, **kwargs)
        return kept_values[key]

    return keep


@dataclass(frozen=True)
class Study(Record):
    """A whole comparison, finished or not.

    labels: the user's names of encodings by the text in their trials; the summary, the
        recommendation and all output use them. Without a label the text is the name.
    recommendation: which row to take and how sure that is.
    limits: what the study cannot say.
    corpus: the text; None if there are only tasks.
    summary: one row per encoding for the trials on text.
    tasks: one row per encoding and task.
    unchecked: failures of encodings that fail the contract and were compared anyway.
    rates: choices of learning rates and settings; empty if all trials use --lr.
    rates_from: where choices come from that this study did not search itself; "" otherwise.
    step_seconds: seconds of single training steps on text by encoding, measured before the trials
        in turns: the first of each encoding one after the other, then the second of each, and so
        on. {} if they were not measured.
    table: the table of another program from which the results are; None for those of compare.
    """

    format: str
    command: str
    started: str
    versions: dict[str, str]
    hardware: dict[str, str]
    corpus: CorpusInfo | None
    trials: tuple[TrialConfig, ...]
    results: tuple[TrialResult, ...] = ()
    summary: tuple[EncodingSummary, ...] = ()
    recommendation: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    unchecked: dict[str, str] = field(default_factory=dict)
    tasks: tuple[TaskSummary, ...] = ()
    rates: tuple[RateCheck, ...] = ()
    limits: str = ""
    rates_from: str = ""
    step_seconds: dict[str, tuple[float, ...]] = field(default_factory=dict)
    table: GivenTable | None = None

    @classmethod
    def read(cls, path: Path, max_bytes: int | None = MAX_STUDY_BYTES) -> Self:
        """Return the study in study.json, see `Record.read`."""
        return super().read(path, max_bytes)

    @classmethod
    def check_format(cls, content: dict[str, Any]) -> None:
        """Raise OtherFormat for the content of another version's study.json."""
        file_format = content.get("format")
        if isinstance(file_format, str) and file_format != FORMAT:
            raise OtherFormat(f"its format is {file_format!r}, and this posenc reads {FORMAT!r}")

    def check(self) -> None:
        """Raise ValueError for a study whose parts do not belong together."""
        if not self.trials:
            raise ValueError("it has no trials.")
        self._check_recipes()
        self._check_step_seconds()
        _check_unique("trial", [(t.task, t.encoding, t.seed) for t in self.trials])
        _check_unique("result", [result.config for result in self.results])
        planned = set(self.trials)
        if other := next((r.config for r in self.results if r.config not in planned), None):
            raise ValueError(f"it has a result of {other.folder}, which is none of its trials.")
        self._check_names()

    def _check_step_seconds(self) -> None:
        """Raise ValueError unless all encodings took equally many steps in turns, in seconds above
        0."""
        for seconds in self.step_seconds.values():
            if not seconds or not all(0 < each < math.inf for each in seconds):
                raise ValueError("the seconds of a training step must be positive.")
        if len({len(seconds) for seconds in self.step_seconds.values()}) > 1:
            raise ValueError("its encodings have different numbers of steps taken in turns.")

    def _check_recipes(self) -> None:
        """Raise ValueError unless the trials of a task differ in encoding and seed only; where
        rates were chosen, also in the rate."""
        recipe_by_task: dict[str, TrialConfig] = {}
        for trial in self.trials:
            recipe = replace(trial, encoding="", seed=0, code="", source="")
            if self.rates:
                recipe = replace(recipe, lr=0.0, encoding_lr=0.0)
            if recipe_by_task.setdefault(trial.task, recipe) != recipe:
                raise ValueError(f"its trials on {trial.task} are of different recipes.")

    def _check_names(self) -> None:
        """Raise ValueError for a name twice, or one that is none of the study's encodings."""
        names = [self.labels.get(encoding, encoding) for encoding in self.encodings]
        for name in names:
            check_encoding_name(name)
        _check_unique("name of an encoding", names)
        known_names = {*self.encodings, *self.labels.values()}
        named_encodings = (*self.labels, *self.unchecked, *self.step_seconds)
        for text in (*named_encodings, *(check.encoding for check in self.rates)):
            if text not in known_names:
                raise ValueError(f"it names {text[:100]!r}, which is none of its encodings.")

    @kept_by_study
    def of_task(self, *tasks: str) -> "Study":
        """Return the study with the trials and results of these tasks only; "text" is one too."""
        return replace(
            self,
            trials=tuple(t for t in self.trials if t.task in tasks),
            results=tuple(r for r in self.results if r.config.task in tasks),
        )

    @property
    def encodings(self) -> tuple[str, ...]:
        """Return the compared encodings, in the order given."""
        return tuple(dict.fromkeys(t.encoding for t in self.trials))

    @property
    def sequence_tasks(self) -> tuple[str, ...]:
        """Return the tasks other than text, in the order given."""
        return tuple(dict.fromkeys(t.task for t in self.trials if not t.is_on_text))

    @property
    def reused(self) -> dict[str, int]:
        """Return the number of results from each other run, by a text with the run's folder and
        processor: `{"runs/a (Intel ...)": 4}`."""
        timings = [r.timing for r in self.finished if r.timing and r.timing.reused_from]
        return Counter(f"{t.reused_from} ({t.processor or 'unknown CPU'})" for t in timings)

    @property
    def finished(self) -> tuple[TrialResult, ...]:
        """Return the results of trials that did not fail."""
        return tuple(r for r in self.results if r.reason is None)

    @property
    def failed(self) -> tuple[TrialResult, ...]:
        """Return the results of trials that failed."""
        return tuple(r for r in self.results if r.reason is not None)

    @property
    def missing(self) -> tuple[TrialConfig, ...]:
        """Return planned trials that have no result yet."""
        configs_with_result = {r.config for r in self.results}
        return tuple(t for t in self.trials if t not in configs_with_result)


def _join_lengths(lengths: Sequence[int]) -> str:
    """Return lengths as text for a message, ten at most, with "..." for the others."""
    dots = "; ..." if len(lengths) > 10 else ""
    return "; ".join(map(str, lengths[:10])) + dots


def _check_unique(what: str, keys: Sequence[Hashable]) -> None:
    """Raise ValueError if one of the keys is there twice. what: name of a key in the message."""
    if duplicate := next((key for key, count in Counter(keys).items() if count > 1), None):
        raise ValueError(f"it has a {what} twice: {str(duplicate)[:100]}.")


@kept_by_study
def with_labels(study: Study) -> Study:
    """Return the study for output: every encoding is named by the user's label where it has one,
    and by its text otherwise."""
    if not study.labels:
        return study

    def with_label(trial: TrialConfig) -> TrialConfig:
        return replace(trial, encoding=study.labels.get(trial.encoding, trial.encoding))

    return replace(
        study,
        trials=tuple(map(with_label, study.trials)),
        results=tuple(replace(r, config=with_label(r.config)) for r in study.results),
        labels={},
        rates=tuple(
            replace(check, encoding=study.labels.get(check.encoding, check.encoding))
            for check in study.rates
        ),
        unchecked={study.labels.get(text, text): why for text, why in study.unchecked.items()},
        step_seconds={
            study.labels.get(text, text): seconds for text, seconds in study.step_seconds.items()
        },
    )
