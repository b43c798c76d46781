"""The table of rows: near and far losses of every encoding in every reading, and what it costs."""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

from posenc.compare.judge.context import context_use
from posenc.compare.judge.sentences import bytes_of_context
from posenc.compare.results import Study
from posenc.compare.rows import EqualTime, Row, at_equal_time, rows_by_name, rows_of
from posenc.compare.scores import FarScore
from posenc.report.report import Block, Section
from posenc.report.table import Cell, Heading, Number, Table, Value

_HOW_TO_READ = (
    "Far: the bytes at the end of the longest windows, as many as a window of training has. Near "
    "context: the same bytes, with at most that many bytes of context. Far context saves: their "
    "difference; ± is a 95 % bootstrap interval over the windows of this text. Context used: more "
    "bytes than those with which a longer window is better for certain, by more than 0.02 bits; at "
    "most those over which no longer one saves so much. Only tested lengths tell. In a window: the "
    "same weights with attention limited to the last bytes, without training. Tuned: after a short "
    "training at the longest length, by the code of posenc extend. Equal time: validation loss "
    "when the fastest encoding ends, read from each curve; a schedule for so many steps would do "
    "better."
)


def reading_sections(study: Study) -> Iterator[Section]:
    """Yield the section of the rows of a text; nothing if no row has far losses, as in old
    results, which the section of the text then says."""
    rows = rows_of(study)
    if not any(row.far for row in rows):
        if any(len(row.trial.test_lengths) > 1 for row in rows):
            yield Section("", ["Losses on far bytes alone were not measured in this run."])
        return
    yield Section("As used: readings, far bytes, time", [*_blocks(study, rows)])
    yield Section("", [_HOW_TO_READ], detail=True)


def _blocks(study: Study, rows: Sequence[Row]) -> Iterator[Block]:
    """Yield the table of rows, and a note where the text has few windows."""
    trial = rows[0].trial
    longest = max(trial.test_lengths)
    equal = at_equal_time(study)
    header = [
        "row",
        Heading(f"near: {trial.train_length:,} bytes", "bits per byte"),
        Heading("far", f"last {trial.train_length:,} of {longest:,} bytes"),
        Heading("near context", "of the same bytes"),
        Heading("far context saves", "bits per byte"),
        Heading("context used", "bytes"),
        Heading("costs", "times the cheapest training"),
        Heading("equal time", "bits per byte, validation"),
    ]
    ordered = sorted(rows_by_name(study).items(), key=lambda item: _order(item[1], longest))
    table = [_table_row(name, of_name, longest, equal) for name, of_name in ordered]
    yield Table(header, table, "Lowest far loss first.", cards=True, name="rows")
    counts = {len(row.far[longest].windows) for row in rows if row.far.get(longest)} - {0}
    if counts and max(counts) < (trial.num_windows or 0):
        yield (
            f"The far bytes are those of {max(counts)} windows, not {trial.num_windows}: the test "
            f"text has room for no more of {longest:,} bytes, so its intervals are wide."
        )


def _order(rows: Sequence[Row], longest: int) -> tuple[float, float]:
    """Return the sort key of a row's seeds: far loss, then near loss; those without come last."""
    far = [score.far for score in _far_scores(rows, longest) if score.far is not None]
    near = [row.near.bits_per_byte for row in rows if row.near.bits_per_byte is not None]
    return fmean(far) if far else math.inf, fmean(near) if near else math.inf


def _far_scores(rows: Sequence[Row], longest: int) -> list[FarScore]:
    """Return the far scores at the longest length of those seeds that have one."""
    return [row.far[longest] for row in rows if longest in row.far]


def _table_row(
    name: str, rows: Sequence[Row], longest: int, equal: EqualTime | None
) -> list[Value]:
    """Return the table's row of an encoding in a reading: means over seeds."""
    near = [row.near.bits_per_byte for row in rows if row.near.bits_per_byte is not None]
    near_cell = Number(fmean(near), form=".3f") if near else None
    far_cells = _far_cells(name, rows, _far_scores(rows, longest))
    return [name, near_cell, *far_cells, *_time_cells(rows, equal)]


def _far_cells(name: str, rows: Sequence[Row], scores: Sequence[FarScore]) -> list[Value]:
    """Return the cells of a row on far bytes: loss, loss with near context, what far context
    saves, how many bytes of context it uses. scores: those of the longest windows."""
    cannot = next((score.cannot for score in scores if score.cannot), None)
    far = [score.far for score in scores if score.far is not None]
    with_near = [score.far_near for score in scores if score.far_near is not None]
    if cannot is not None or not far or not with_near:
        return [Cell("cannot", note=f"{name}: {cannot or 'not measured'}"), None, None, None]
    far_cell = Number(fmean(far), form=".3f")
    near_context_cell = Number(fmean(with_near), form=".3f")
    use = context_use(rows)
    if use is None:
        return [far_cell, near_context_cell, None, None]
    half = "" if use.saved.half == math.inf else f" ± {use.saved.half:.3f}"
    saved = Number(round(use.saved.value, 3) + 0.0, form="+.3f", unit=half)
    return [far_cell, near_context_cell, saved, bytes_of_context(use) or None]


def _time_cells(rows: Sequence[Row], equal: EqualTime | None) -> list[Value]:
    """Return the cells of a row on time: what training costs, and the loss at equal time; None
    where time was not measured."""
    encoding = rows[0].encoding
    if equal is None or encoding not in equal.costs:
        return [None, None]
    with_tuning = [row.seconds / row.trained_seconds for row in rows if row.seconds]
    cost = Number(equal.costs[encoding] * fmean(with_tuning or [1.0]), form=".2f")
    losses = equal.losses.get(encoding, {})
    # The curve is that of training as usual: other readings have none of their own.
    has_curve = bool(losses) and rows[0].reading == "trained"
    return [cost, Number(fmean(losses.values()), form=".3f") if has_curve else None]
