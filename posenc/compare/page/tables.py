"""A study as a table for the terminal and as rows for a spreadsheet."""

from __future__ import annotations

import csv
import dataclasses
import io
from functools import partial
from typing import Any

from rich.table import Table

from posenc.compare.judge import published
from posenc.compare.judge.published import Agreement
from posenc.compare.page import rows, settings
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import name_of
from posenc.compare.trial.effective_spec import AXES
from posenc.report.page.console import text_table
from posenc.tasks.known import TASKS, TEXT

_table = partial(text_table, named="encoding", title_justify="left")


def summary_table(study: Study) -> Table:
    """Return one row per encoding, best first: losses by length, gain from context, speed."""
    lengths = [f"{length:,}" for length in study.trials[0].test_lengths]
    header, lines = ["encoding", *lengths, "more context", "parameters", "tokens/s"], []
    for row in rows.text_rows(study):
        of = row.summary
        speed = "" if of.tokens_per_second is None else f"{of.tokens_per_second:,.0f}"
        losses = map(_cell, row.losses)
        lines.append([of.encoding, *losses, row.context, f"{of.parameters:,}", speed])
    table = _table(header, lines, title="Bits per byte by window length (lower is better)")
    table.caption, table.caption_justify = rows.detectable(study), "left"
    return table


def rate_tables(study: Study) -> list[Table]:
    """Return the learning rates that were tried; [] if none were."""
    found = settings.rate_rows(study)
    return [_table(found[0], found[1:], title=settings.TITLE)] if found else []


def agreement_table(found: list[Agreement]) -> Table:
    """Return the agreement of a study with published tables."""
    left: dict[str, Any] = {"title_justify": "left", "caption_justify": "left"}
    title, caption = "Agreement with published orders", published.MEANING
    rows = published.rows(found)
    return text_table(published.HEADER, rows, title=title, caption=caption, **left)


def notes(study: Study) -> list[str]:
    """What the table does not show: encodings that fail a check, lengths that cannot run,
    encodings of several axes in a row of tokens, failed trials, missing trials."""
    lines = [f"{name} is compared unchecked: {why}" for name, why in study.unchecked.items()]
    lines += [
        f"{name}: a position has {axes} components, and in a row of tokens each of them is the "
        "token's number; compare it on --task grid too"
        for name, axes in _of_several_axes(study).items()
    ]
    for row in study.summary:
        reasons = dict.fromkeys(s.cannot for s in row.by_length if s.cannot)
        lines += [f"{row.encoding}: cannot run at some lengths: {reason}" for reason in reasons]
    lines += [f"reused {count} trials from {where}" for where, count in study.reused.items()]
    for result in study.failed:
        lines.append(f"{name_of(result.config)} failed: {result.reason}")
    if study.missing:
        names = ", ".join(map(name_of, study.missing))
        lines.append(f"missing {len(study.missing)} of {len(study.trials)} trials: {names}")
    return lines


def _of_several_axes(study: Study) -> dict[str, str]:
    """Return the number of axes of each encoding that has several but read a row of tokens."""
    return {
        trial.config.encoding: trial.spec[AXES]
        for trial in study.finished
        if AXES in trial.spec
        and (trial.config.task == TEXT or TASKS[trial.config.task].num_axes == 1)
    }


def csv_text(study: Study) -> str:
    """One row per number: which trial, what was measured, at which length, position or step. The
    column bits_per_byte holds the scores of tasks too, which are shares between 0 and 1."""
    out = io.StringIO()
    config = [f.name for f in dataclasses.fields(study.trials[0])]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["measure", "at", "bits_per_byte", "note", "tokens_per_second", *config])
    for result in study.results:
        fields = dataclasses.asdict(result.config)
        fields["test_lengths"] = " ".join(map(str, result.config.test_lengths))
        speed = "" if result.timing is None else round(result.timing.tokens_per_second)
        for measure, at, bits, note in _numbers(result):
            value = "" if bits is None else repr(bits)
            writer.writerow([measure, at, value, note, speed, *(fields[c] for c in config)])
    return out.getvalue()


def _numbers(result: TrialResult):
    if result.reason is not None:
        yield "failed", "", None, result.reason
    for score in result.by_length:
        yield "by_length", score.length, score.bits_per_byte, score.cannot or ""
    for score in result.by_context:
        yield "by_context", score.length, score.bits_per_byte, score.cannot or ""
    for bucket in result.by_position:
        yield "by_position", bucket.start, bucket.bits_per_byte, f"to {bucket.stop - 1}"
    for case in result.by_case:
        for measure in CASE_MEASURES:
            value = getattr(case, measure)
            if value is not None or case.cannot:
                yield measure, case.length, value, case.cannot or case.variant
    for point in result.training:
        yield "train", point.step, point.train, ""
        yield "valid", point.step, point.valid, ""


CASE_MEASURES = ("exact_match", "token_accuracy", "exact_match_cut", "token_accuracy_cut")


def _cell(loss: rows.Loss) -> str:
    return "cannot" if loss.mean is None else f"{loss.mean:.3f} {loss.verdict}".strip()
