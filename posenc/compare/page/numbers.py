"""The numbers of a study for other programs: JSON with the answer, and results.csv with a row for
each number."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from posenc.compare.judging.answer import answer_and_choices
from posenc.compare.judging.context_use import context_use
from posenc.compare.judging.near_far import standings
from posenc.compare.judging.standing import Standing, standing_of_task, standing_of_tasks
from posenc.compare.judging.units import units_of
from posenc.compare.results import Study, TrialResult
from posenc.compare.rows import rows_by_name
from posenc.compare.scores import FarScore
from posenc.compare.trial.config import TrialConfig
from posenc.tasks.registry import TASKS, TEXT


def facts_of(study: Study, folder: Path | None = None) -> dict[str, Any]:
    """Return the answer of a study and the numbers behind it; a number is None if unknown.

    folder: where its page and study.json lie, if they are kept. "use" lists the encodings that the
    answer says to use. "places" has one item for all tasks, for near and for far bytes of the text,
    and for each task. "context" says of each row of the text how much context it uses.
    """
    choices = answer_and_choices(study)
    content = {
        "answer": study.recommendation,
        "cannot_say": study.limits,
        "use": choices.row_names,
        "sure": choices.certainties,
        "places": _standing_objects(study),
        "context": _context_objects(study),
        "trials": {
            "planned": len(study.trials),
            "finished": len(study.finished),
            "steps": _shared_value([trial.steps for trial in study.trials]),
            "train_length": _shared_value([trial.train_length for trial in study.trials]),
            "reused": _reused_trials(study),
            "failed": {result.config.folder: result.reason for result in study.failed},
        },
    }
    for trial in study.trials:
        if trial.train_lengths:  # the same for all trials on text
            content["trials"]["train_lengths"] = list(trial.train_lengths)
    if study.table is not None:
        content["table"] = study.table
    for name, file in (("report", "report.html"), ("study", "study.json")):
        if folder is not None and (folder / file).is_file():
            content[name] = str(folder / file)
    return content


def _shared_value(values: Sequence[int]) -> int | None:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None


def _standing_objects(study: Study) -> list[dict[str, Any]]:
    """Return the standing over all tasks, at each length of the text, and on each task."""
    standing_objects = []
    overall = standing_of_tasks(study)
    if overall is not None:
        standing_objects.append(_standing_object(overall, "mean rank"))
    text_study = study.of_task(TEXT)
    if text_study.finished:
        standing_objects += [
            _standing_object(standing, units_of(study).bits) for standing in standings(text_study)
        ]
    for task in study.sequence_tasks:
        standing = standing_of_task(study, task)
        if standing is not None:
            standing_objects.append(_standing_object(standing, TASKS[task].metric))
    return standing_objects


def _context_objects(study: Study) -> dict[str, dict[str, Any]]:
    """Return, by row of the text, how many bytes, or tokens, of context it uses, see ContextUse;
    rows whose far targets were not measured are left out."""
    object_by_row = {}
    for name, rows in rows_by_name(study).items():
        use = context_use(rows)
        if use is not None:
            object_by_row[name] = {
                "more_than": use.more_than,
                "at_most": use.at_most,
                "windows": [use.near_length, use.longest_length],
                "unit": units_of(study).length,
                "saved": use.saved.value,
                "half_over_windows": _finite_or_none(use.saved.half_width),
            }
    return object_by_row


def _reused_trials(study: Study) -> dict[str, dict[str, str | None]]:
    """Return, by a trial's folder, which other run trained it, and on which processor."""
    reused = {}
    for result in study.finished:
        timing = result.timing
        if timing and timing.reused_from:
            reused[result.config.folder] = {
                "from": timing.reused_from,
                "processor": timing.processor or None,
            }
    return reused


def _standing_object(standing: Standing, unit: str) -> dict[str, Any]:
    """Return a standing as one object of "places": the first encodings, and each encoding, best
    first, with its differences from the first one.

    unit: of the numbers, in words.
    """
    return {
        "where": standing.where,
        "unit": unit,
        "higher_is_better": standing.higher_is_better,
        "level": standing.pairs.level,
        "least_difference": _finite_or_none(standing.least_significant_gap),
        "first": list(standing.contenders),
        "encodings": [_encoding_object(standing, name) for name in standing.order],
    }


def _encoding_object(standing: Standing, name: str) -> dict[str, Any]:
    """Return one encoding of a standing: its numbers, and its difference from the first one, which
    has None there."""
    first = standing.order[0]
    seed_value_pairs = sorted(standing.pairs.values[name].items())
    minus_first = None
    half_over_seeds = None
    half_over_windows = None
    if name != first:
        gap = standing.gap(name)
        minus_first = gap.value
        half_over_seeds = _finite_or_none(gap.half_width)
        gap_over_windows = standing.gaps_over_windows.get((name, first))
        if gap_over_windows is not None:
            half_over_windows = _finite_or_none(gap_over_windows.half_width)
    return {
        "encoding": name,
        "mean": standing.mean(name),
        "seeds": {str(seed): value for seed, value in seed_value_pairs},
        "minus_first": minus_first,
        "half_over_seeds": half_over_seeds,
        "half_over_windows": half_over_windows,
        "verdict": standing.verdict(name),
        "tier": standing.tier(name),
    }


def _finite_or_none(number: float) -> float | None:
    """Return a number that is finite; None for another, which JSON lacks."""
    return number if math.isfinite(number) else None


COLUMNS = ("measure", "at", "bits_per_byte", "note", "tokens_per_second")
"""The first columns of results.csv."""


def csv_text(study: Study) -> str:
    """Return one row per number: which trial, what was measured, at which length, position or step.
    The column bits_per_byte holds the scores of tasks too, which are shares between 0 and 1, and of
    tokens whose bytes are not known bits per token: their column tokenizer is empty."""
    csv_stream = io.StringIO()
    setting_names = [f.name for f in dataclasses.fields(study.trials[0])]
    writer = csv.writer(csv_stream, lineterminator="\n")
    writer.writerow([*COLUMNS, *setting_names])
    for result in study.results:
        settings = _settings_of(result.config)
        speed = 0.0 if result.timing is None else result.timing.tokens_per_second
        speed_cell = round(speed) if speed else ""
        setting_values = [settings[name] for name in setting_names]
        for measurement in _measurements(result):
            value_text = "" if measurement.value is None else repr(measurement.value)
            writer.writerow(
                [
                    measurement.measure,
                    measurement.length_or_step,
                    value_text,
                    measurement.note,
                    speed_cell,
                    *setting_values,
                ]
            )
    return csv_stream.getvalue()


_SETTINGS_OF_TABLES = ("encoding", "seed", "train_length", "test_lengths", "steps", "task")
"""Fields of a TrialConfig that a table of losses may have; the others are unknown."""


def _settings_of(config: TrialConfig) -> dict[str, Any]:
    """Return the fields of a trial's config as cells, "" for what is unknown."""
    settings = dataclasses.asdict(config)
    settings["architecture"] = str(config.architecture)
    for name in ("test_lengths", "train_lengths"):
        settings[name] = " ".join(map(str, getattr(config, name)))
    if config.is_of_table:
        settings |= {name: "" for name in settings if name not in _SETTINGS_OF_TABLES}
        settings["steps"] = config.steps or ""
    return settings


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
        range_end_note = f"to {bucket.stop - 1}"
        yield _Measurement("by_position", bucket.start, bucket.bits_per_byte, range_end_note)
    yield from _measurements_of_cases(result)
    for point in result.training:
        if point.train is not None:
            yield _Measurement("train", point.step, point.train, "")
        yield _Measurement("valid", point.step, point.valid, "")


def _measurements_of_far_targets(
    scores: Sequence[FarScore], measure_prefix: str
) -> Iterator[_Measurement]:
    """Yield the losses of far targets with all context and with near context only;
    `measure_prefix` begins the name of the measure."""
    for score in scores:
        yield _Measurement(f"{measure_prefix}far", score.length, score.far, score.cannot or "")
        if score.far_near is not None or score.cannot:
            yield _Measurement(
                f"{measure_prefix}far_near", score.length, score.far_near, score.cannot or ""
            )


def _measurements_of_cases(result: TrialResult) -> Iterator[_Measurement]:
    """Yield the scores of a task's tests, and why a test cannot run under each measure."""
    for case in result.by_case:
        for measure in CASE_MEASURES:
            value = getattr(case, measure)
            if value is not None or case.cannot:
                yield _Measurement(measure, case.length, value, case.cannot or case.variant)


CASE_MEASURES = ("exact_match", "token_accuracy", "exact_match_cut", "token_accuracy_cut")
"""Fields of a CaseScore that become rows of results.csv."""
