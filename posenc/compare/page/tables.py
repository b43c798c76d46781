"""A study as a table for the terminal and as rows for a spreadsheet."""

import csv
import dataclasses
import io
from typing import Any

from rich.table import Table

from posenc.compare.page import rows, settings
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import name_of
from posenc.compare.trial.effective_spec import AXES
from posenc.compare.trial.evaluate import CANNOT
from posenc.report.page.console import text_table
from posenc.sentence import phrase, retold
from posenc.tasks.known import TASKS

COLUMNS = ("measure", "at", "bits_per_byte", "note", "tokens_per_second")
"""The first columns of results.csv."""


def summary_table(study: Study) -> Table:
    """Return one row per encoding, best first: losses by length, gain from context, speed."""
    lengths = [f"{length:,}" for length in study.trials[0].test_lengths]
    named, context = phrase("encoding"), phrase("more context")
    header, lines = [named, *lengths, context, phrase("parameters"), phrase("tokens/s")], []
    most = max((row.num_seeds for row in study.summary), default=0)
    for of, losses, context in rows.text_rows(study):
        speed = "" if of.tokens_per_second is None else f"{of.tokens_per_second:,.0f}"
        cells = [*map(_cell, losses), context, f"{of.parameters:,}", speed]
        some = phrase("{part} of {whole}", part=of.num_seeds, whole=most)
        lines.append([of.encoding if of.num_seeds == most else f"{of.encoding} ({some})", *cells])
    title = phrase("Bits per byte by window length (lower is better)")
    table = text_table(header, lines, named=named, title=title, title_justify="left")
    table.caption, table.caption_justify = rows.detectable(study), "left"
    return table


def rate_tables(study: Study) -> list[Table]:
    """Return the learning rates that were tried; [] if none were."""
    found, title = settings.rate_rows(study), phrase("title of learning rates")
    style: dict[str, Any] = {"named": phrase("encoding"), "title_justify": "left"}
    return [text_table(found[0], found[1:], title=title, **style)] if found else []


def notes(study: Study) -> list[str]:
    """Return what the table does not show: encodings that fail a check, lengths that cannot run,
    encodings of several axes in a row of tokens, failed trials, missing trials."""
    lines = [phrase("Note: unchecked", name=n, why=why) for n, why in study.unchecked.items()]
    lines += dict.fromkeys(
        phrase("several axes", name=trial.config.encoding, axes=trial.spec[AXES])
        for trial in study.finished
        if AXES in trial.spec and (trial.config.of_text or TASKS[trial.config.task].num_axes == 1)
    )
    for row in study.summary:
        reasons = dict.fromkeys(retold(s.cannot, CANNOT) for s in row.by_length if s.cannot)
        lines += [phrase("Note: cannot run", name=row.encoding, reason=why) for why in reasons]
    lines += [phrase("Note: reused", count=n, where=where) for where, n in study.reused.items()]
    failed = "{trial} failed: {reason}"
    lines += [phrase(failed, trial=name_of(r.config), reason=r.reason) for r in study.failed]
    if study.missing:
        names = phrase(", ").join(map(name_of, study.missing))
        counts = {"part": len(study.missing), "whole": len(study.trials)}
        lines.append(phrase("Note: missing", names=names, **counts))
    return lines


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
    if loss.mean is None:
        return phrase("cannot")
    return f"{loss.mean:.3f} {phrase(loss.verdict)}".strip()
