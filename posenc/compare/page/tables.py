"""A study as a table for the terminal and as rows for a spreadsheet."""

import csv
import dataclasses
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table

from posenc.compare.page import rows, settings
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import TrialConfig, describe_trial
from posenc.compare.trial.effective_spec import AXES
from posenc.report.page.console import text_table
from posenc.tasks.known import TASKS

COLUMNS = ("measure", "at", "bits_per_byte", "note", "tokens_per_second")
"""The first columns of results.csv."""


def summary_table(study: Study) -> Table:
    """Return one row per encoding, best first: losses by length, gain from context, speed."""
    lengths = [f"{length:,}" for length in study.trials[0].test_lengths]
    named = "encoding"
    header = [named, *lengths, "more context", "parameters", "tokens/s"]
    lines = []
    most_seeds = max((row.num_seeds for row in study.summary), default=0)
    for summary, losses, context in rows.text_rows(study):
        name = summary.encoding
        if summary.num_seeds != most_seeds:
            some = f"{summary.num_seeds} of {most_seeds}"
            name = f"{name} ({some})"
        speed = "" if summary.tokens_per_second is None else f"{summary.tokens_per_second:,.0f}"
        lines.append([name, *map(_loss_text, losses), context, f"{summary.parameters:,}", speed])
    title = "Bits per byte by window length (lower is better)"
    table = text_table(header, lines, named=named, title=title, title_justify="left")
    table.caption = rows.describe_detectable_difference(study)
    table.caption_justify = "left"
    return table


def rate_tables(study: Study) -> list[Table]:
    """Return the learning rates that were tried; [] if none were."""
    header_and_rows = settings.rate_rows(study)
    if not header_and_rows:
        return []
    title = "Learning rates, by the loss on validation data like that of training"
    style: dict[str, Any] = {"named": "encoding", "title_justify": "left"}
    return [text_table(header_and_rows[0], header_and_rows[1:], title=title, **style)]


def study_notes(study: Study) -> list[str]:
    """Return what the table does not show: encodings that fail a check, lengths that cannot run,
    encodings of several axes in a row of tokens, failed trials, missing trials."""
    lines = [f"{n} is compared unchecked: {why}" for n, why in study.unchecked.items()]
    lines += dict.fromkeys(
        (
            f"{trial.config.encoding}: a position has {trial.spec[AXES]} components, and in a row "
            "of tokens each of them is the token's number; compare it on --task grid too"
        )
        for trial in study.finished
        if AXES in trial.spec and _has_one_axis(trial.config)
    )
    for row in study.summary:
        reasons = dict.fromkeys(score.cannot for score in row.by_length if score.cannot)
        lines += [f"{row.encoding}: cannot run at some lengths: {why}" for why in reasons]
    lines += [f"reused {n} trials from {where}" for where, n in study.reused.items()]
    lines += [f"{describe_trial(result.config)} failed: {result.reason}" for result in study.failed]
    if study.missing:
        names = ", ".join(map(describe_trial, study.missing))
        lines.append(f"missing {len(study.missing)} of {len(study.trials)} trials: {names}")
    return lines


def _has_one_axis(config: TrialConfig) -> bool:
    """Return True if a trial's tokens have positions with one component."""
    return config.is_on_text or TASKS[config.task].num_axes == 1


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
                [measured.measure, measured.at, value, measured.note, speed, *settings_of_trial]
            )
    return out.getvalue()


class _Measurement(NamedTuple):
    """A number of a trial: what was measured, at which length, position or step. `value` is None
    for a failure or a test that cannot run, and `note` says why."""

    measure: str
    at: int | str
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
    for bucket in result.by_position:
        until = f"to {bucket.stop - 1}"
        yield _Measurement("by_position", bucket.start, bucket.bits_per_byte, until)
    yield from _measurements_of_cases(result)
    for point in result.training:
        yield _Measurement("train", point.step, point.train, "")
        yield _Measurement("valid", point.step, point.valid, "")


def _measurements_of_cases(result: TrialResult) -> Iterator[_Measurement]:
    """Yield the scores of a task's tests, and why a test cannot run under each measure."""
    for case in result.by_case:
        for measure in CASE_MEASURES:
            value = getattr(case, measure)
            if value is not None or case.cannot:
                yield _Measurement(measure, case.length, value, case.cannot or case.variant)


CASE_MEASURES = ("exact_match", "token_accuracy", "exact_match_cut", "token_accuracy_cut")
"""Fields of a CaseScore that become rows of results.csv."""


def _loss_text(loss: rows.Loss) -> str:
    """Return the text of a loss with its verdict, on the terminal."""
    if loss.mean is None:
        return "cannot"
    return f"{loss.mean:.3f} {loss.verdict}".strip()
