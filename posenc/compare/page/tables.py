"""A study as a table for the terminal and as rows for a spreadsheet."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from posenc.compare.judge import published
from posenc.compare.judge.published import Agreement
from posenc.compare.page import rows
from posenc.compare.plan import learning_rate_search
from posenc.compare.results import Study, TrialResult
from posenc.compare.trial.config import name_of
from posenc.compare.trial.effective_spec import AXES
from posenc.tasks.known import TASKS, TEXT


def summary_table(study: Study) -> Table:
    """One row per encoding, best first: bits per byte at each length, what more context does,
    speed."""
    table = Table(title="Bits per byte by window length (lower is better)", title_justify="left")
    table.add_column("encoding")
    for length in study.trials[0].test_lengths:
        table.add_column(f"{length:,}", justify="right")
    for name in ("more context", "parameters", "tokens/s"):
        table.add_column(name, justify="right")
    for row in rows.text_rows(study):
        speed = row.summary.tokens_per_second
        table.add_row(
            escape(row.summary.encoding),
            *map(_cell, row.losses),
            row.context,
            f"{row.summary.parameters:,}",
            "" if speed is None else f"{speed:,.0f}",
        )
    table.caption, table.caption_justify = rows.detectable(study), "left"
    return table


def rate_tables(study: Study) -> list[Table]:
    """The learning rates that were tried, where they were."""
    found = learning_rate_search.rate_rows(study)
    return [_of_words(learning_rate_search.TITLE, found[0], found[1:])] if found else []


def agreement_table(found: list[Agreement]) -> Table:
    """A study against published tables."""
    table = Table(title="Agreement with published orders", title_justify="left")
    for name in published.HEADER:
        table.add_column(name)
    for row in published.rows(found):
        table.add_row(*map(escape, row))
    table.caption = published.MEANING
    table.caption_justify = "left"
    return table


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
    for result in study.failed:
        lines.append(f"{name_of(result.config)} failed: {result.reason}")
    if study.missing:
        names = ", ".join(map(name_of, study.missing))
        lines.append(f"missing {len(study.missing)} of {len(study.trials)} trials: {names}")
    return lines


def _of_several_axes(study: Study) -> dict[str, str]:
    """How many components a position has, by encoding, where it was compared in a row of tokens."""
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


def _of_words(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name == "encoding" else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
