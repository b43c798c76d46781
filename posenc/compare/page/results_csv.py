"""results.csv: every number of every trial, a row each, for a spreadsheet."""

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from posenc.compare.results import Study, TrialResult
from posenc.compare.scores import FarScore

COLUMNS = ("measure", "at", "bits_per_byte", "note", "tokens_per_second")
"""The first columns of results.csv."""


def csv_text(study: Study) -> str:
    """Return one row per number: which trial, what was measured, at which length, position or step.
    The column bits_per_byte holds the scores of tasks too, which are shares between 0 and 1."""
    out = io.StringIO()
    config = [f.name for f in dataclasses.fields(study.trials[0])]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, *config])
    for result in study.results:
        fields = dataclasses.asdict(result.config)
        fields["test_lengths"] = " ".join(map(str, result.config.test_lengths))
        speed = "" if result.timing is None else round(result.timing.tokens_per_second)
        settings_of_trial = [fields[name] for name in config]
        for measured in _measurements(result):
            value = "" if measured.value is None else repr(measured.value)
            writer.writerow(
                [
                    measured.measure,
                    measured.length_or_step,
                    value,
                    measured.note,
                    speed,
                    *settings_of_trial,
                ]
            )
    return out.getvalue()


class _Measurement(NamedTuple):
    """A number of a trial: what was measured, at which length, position or step. `value` is None
    for a failure or a test that cannot run, and `note` says why."""

    measure: str
    length_or_step: int | str
    value: float | None
    note: str


def _measurements(result: TrialResult) -> Iterator[_Measurement]:
    """Yield every number of a trial, or why it failed."""
    if result.reason is not None:
        yield _Measurement("failed", "", None, result.reason)
    for score in result.by_length:
        yield _Measurement("by_length", score.length, score.bits_per_byte, score.cannot or "")
    for score in result.by_context:
        yield _Measurement("by_context", score.length, score.bits_per_byte, score.cannot or "")
    yield from _measurements_of_far_targets(result.far, "")
    for reading in result.readings:
        if reading.cannot is not None:
            yield _Measurement(reading.name, "", None, reading.cannot)
        for score in reading.by_length:
            measure = f"{reading.name} by_length"
            yield _Measurement(measure, score.length, score.bits_per_byte, score.cannot or "")
        yield from _measurements_of_far_targets(reading.far, f"{reading.name} ")
    for bucket in result.by_position:
        until = f"to {bucket.stop - 1}"
        yield _Measurement("by_position", bucket.start, bucket.bits_per_byte, until)
    yield from _measurements_of_cases(result)
    for point in result.training:
        yield _Measurement("train", point.step, point.train, "")
        yield _Measurement("valid", point.step, point.valid, "")


def _measurements_of_far_targets(
    scores: Sequence[FarScore], reading: str
) -> Iterator[_Measurement]:
    """Yield the losses of far targets with all context and with near context only; `reading`
    begins the name of the measure."""
    for score in scores:
        yield _Measurement(f"{reading}far", score.length, score.far, score.cannot or "")
        yield _Measurement(f"{reading}far_near", score.length, score.far_near, score.cannot or "")


def _measurements_of_cases(result: TrialResult) -> Iterator[_Measurement]:
    """Yield the scores of a task's tests, and why a test cannot run under each measure."""
    for case in result.by_case:
        for measure in CASE_MEASURES:
            value = getattr(case, measure)
            if value is not None or case.cannot:
                yield _Measurement(measure, case.length, value, case.cannot or case.variant)


CASE_MEASURES = ("exact_match", "token_accuracy", "exact_match_cut", "token_accuracy_cut")
"""Fields of a CaseScore that become rows of results.csv."""
