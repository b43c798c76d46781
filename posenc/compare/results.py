"""The results of a study and its trials: frozen dataclasses that go to JSON and back.

{"sha256": "9c...",                             of everything below; every record on disk has it
 "format": "posenc study 2",
 "command": "posenc compare rope learned --steps 500",
 "started": "2026-01-31T12:00:00+00:00",
 "versions": {"posenc": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
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
    "by_context": [{"length": 64, "bits_per_byte": 2.5, "cannot": null}, ...],
    "timing": {"tokens_per_second": 12000.0, "train_seconds": 160.0, "test_seconds": 9.0}},
   {"config": {...}, "reason": "loss became nan at step 40", ...}],   one that failed
 "summary": [{"encoding": "rope", "parameters": 853000, "num_seeds": 2,
              "by_length": [{"length": 128, "mean": 2.19, "spread": 0.01, "cannot": null}],
              "reach": 128, "tokens_per_second": 12000.0}],
 "recommendation": "Use rope: ...", "limits": "Two seeds, ..."}
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from posenc.compare.trial.config import TrialConfig
from posenc.report.files.record import Record, parse_object

FORMAT = "posenc study 2"


@dataclass(frozen=True)
class LengthScore(Record):
    """Bits per byte at one window length, or why the encoding cannot run there.

    windows: bits per byte of each held-out window of the longest length, cut to this length, in
        the order of the text; empty where they were not kept.
    """

    length: int
    bits_per_byte: float | None
    cannot: str | None = None
    windows: tuple[float, ...] = ()


@dataclass(frozen=True)
class PositionScore(Record):
    """Bits per byte of the targets at positions start .. stop - 1 inside the window."""

    start: int
    stop: int
    bits_per_byte: float


@dataclass(frozen=True)
class CaseScore(Record):
    """What a model said on the held-out sequences of a task's case, as posenc.tasks.scoring counts
    it, or why the encoding cannot run there; `variant` as in posenc.tasks.task.Case."""

    length: int
    variant: str = ""
    exact_match: float | None = None
    token_accuracy: float | None = None
    exact_match_cut: float | None = None
    token_accuracy_cut: float | None = None
    cannot: str | None = None


@dataclass(frozen=True)
class TrainingPoint(Record):
    """Bits per byte, or per target of a task, after `step` steps: the mean over the steps since the
    last point, and on the validation text or on held-out sequences like those of training."""

    step: int
    train: float
    valid: float


@dataclass(frozen=True)
class Timing(Record):
    """Wall-clock cost of a trial on one worker."""

    tokens_per_second: float
    train_seconds: float
    test_seconds: float


@dataclass(frozen=True)
class TrialResult(Record):
    """The result of one trial; `reason` says why it failed, None if it did not.

    by_length: over non-overlapping windows of each test length, on the same held-out bytes.
    by_position: inside the longest window that the encoding can run.
    by_context: on the same fixed target bytes (the last train_length // 2 of each longest window),
        seen at the end of windows of growing length.
    spec: the encoding as it ran, in words and numbers.
    by_case: of a task, the scores of every test, that of the training length first.
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


@dataclass(frozen=True)
class CorpusInfo(Record):
    """The text: sizes in bytes.

    byte_entropy: of its bytes' frequencies, in bits per byte, which is what it takes to know of a
        byte nothing but how frequent it is; None where it was not kept.
    """

    name: str
    hash: str
    num_files: int
    train_bytes: int
    valid_bytes: int
    test_bytes: int
    split: str
    """How it was split, in words."""
    byte_entropy: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LengthSummary(Record):
    """Bits per byte over seeds: mean, and half the distance between the best and the worst."""

    length: int
    mean: float | None
    spread: float | None
    cannot: str | None = None


@dataclass(frozen=True)
class EncodingSummary(Record):
    """One row of the table; only finished trials count.

    reach: the longest tested length up to which the mean stays within 5 % of the encoding's own at
    the training length, however high that is; None where it has none there.
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

    mean: over the seeds, learned or not; None where the encoding cannot run.
    seeds: of every seed; empty where the encoding cannot run.
    """

    length: int
    variant: str
    mean: float | None
    seeds: tuple[float, ...]
    cannot: str | None = None


@dataclass(frozen=True)
class TaskSummary(Record):
    """One row of a task's table; only finished trials count.

    learned: how many seeds pass the gate, see posenc.compare.judge.summary.
    """

    task: str
    encoding: str
    parameters: int
    num_seeds: int
    learned: int
    cases: tuple[CaseSummary, ...]


@dataclass(frozen=True)
class RateTried(Record):
    """A learning rate: bits per byte or target on the validation data after training, or why it
    could not be trained."""

    lr: float
    bits: float | None
    reason: str | None = None


@dataclass(frozen=True)
class RateCheck(Record):
    """The learning rates tried for an encoding on a task, and the one taken; see
    posenc.compare.plan.plan.learning_rate_search."""

    task: str
    encoding: str
    tried: tuple[RateTried, ...]
    chosen: float | None


class OtherFormat(ValueError):
    """The study was written by another version of posenc."""


@dataclass(frozen=True)
class Study(Record):
    """All of a comparison, finished or not.

    labels: what the user calls an encoding, by the text that its trials have; the summary, the
        recommendation and all that is shown call it so. Without one the text is its name.
    recommendation: which encoding to use, in at most 60 words.
    limits: what the study cannot say, in at most 40 words.
    corpus: the text; None where only tasks are learned.
    summary: of the trials of text.
    tasks: of the trials of tasks.
    unchecked: for encodings that fail the contract and were compared all the same, what fails.
    rates: how the learning rates of the trials were chosen; empty where all have the one given.
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

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises: OtherFormat; ValueError where the text is damaged."""
        found = parse_object(text).get("format")
        if isinstance(found, str) and found != FORMAT:
            raise OtherFormat(f"its format is {found!r}, and this posenc reads {FORMAT!r}")
        return super().from_json(text)

    def of_task(self, task: str) -> Self:
        """The part of the study whose trials learn one task, "text" among them."""
        return replace(
            self,
            trials=tuple(t for t in self.trials if t.task == task),
            results=tuple(r for r in self.results if r.config.task == task),
        )

    @property
    def encodings(self) -> tuple[str, ...]:
        """The encodings compared, in the order asked for."""
        return tuple(dict.fromkeys(t.encoding for t in self.trials))

    @property
    def finished(self) -> tuple[TrialResult, ...]:
        return tuple(r for r in self.results if r.reason is None)

    @property
    def failed(self) -> tuple[TrialResult, ...]:
        return tuple(r for r in self.results if r.reason is not None)

    @property
    def missing(self) -> tuple[TrialConfig, ...]:
        """Trials that were planned and have no result yet."""
        known = {r.config for r in self.results}
        return tuple(t for t in self.trials if t not in known)


def labelled(study: Study) -> Study:
    """The study with the user's labels in place of the texts, for whatever is shown."""
    if not study.labels:
        return study

    def shown(trial: TrialConfig) -> TrialConfig:
        return replace(trial, encoding=study.labels.get(trial.encoding, trial.encoding))

    return replace(
        study,
        trials=tuple(map(shown, study.trials)),
        results=tuple(replace(r, config=shown(r.config)) for r in study.results),
        labels={},
        rates=tuple(
            replace(each, encoding=study.labels.get(each.encoding, each.encoding))
            for each in study.rates
        ),
        unchecked={study.labels.get(text, text): why for text, why in study.unchecked.items()},
    )
