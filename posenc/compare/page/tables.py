"""The tables of a study: of a text its losses, verdicts, rows and seeds; of tasks a matrix of all,
and the scores of each by length."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median

from posenc.compare.judging import sentences
from posenc.compare.judging.context_use import context_use
from posenc.compare.judging.near_far import (
    Places,
    encodings_best_first,
    far_place_in_words,
    near_and_far,
    standing_by_column,
    standings,
)
from posenc.compare.judging.sentences import range_of_context
from posenc.compare.judging.standing import Standing, order_by_standings, ranks_without_a_task
from posenc.compare.judging.summary import REACH_TOLERANCE, falls_since_half
from posenc.compare.judging.units import Units, units_of
from posenc.compare.page import figures
from posenc.compare.page.how_to_read import how_to_read_rows
from posenc.compare.page.settings import train_lengths_in_words
from posenc.compare.results import CaseSummary, Study, TaskSummary
from posenc.compare.rows import EqualTime, Row, at_equal_time, rows_by_name, rows_of
from posenc.compare.scores import FarScore
from posenc.compare.trial.config import TrialConfig
from posenc.report.report import Block, Cell, Heading, Number, Section, Table, Value
from posenc.tasks.registry import TASKS, TEXT
from posenc.tasks.scoring import LEAST_LEARNED_EXACT_MATCH


def text_table(study: Study) -> Table:
    """Return the table of the text, a row for each encoding and reading, best first on far bytes.

    Near bytes and far bytes are judged; a reading of an encoding that is not judged has its far
    loss without a verdict. Means over whole windows follow."""
    places = near_and_far(study)
    lengths = study.trials[0].test_lengths[1:]
    # Encodings that fail the contract may be all that were measured on far bytes.
    has_far = places.far is not None or any(row.far_by_length for row in rows_of(study))
    units = units_of(study)
    header = [
        "encoding",
        Heading(f"{study.trials[0].train_length:,} {units.length}", units.bits),
        *([Heading(far_place_in_words(study), units.bits)] if has_far else []),
        *(Heading(f"{length:,} {units.length}", "mean over the window") for length in lengths),
        Heading("parameters", "of the whole model"),
        Heading("tokens/s", "in training, one process"),
        Heading("seeds", "that finished"),
    ]
    by_name = rows_by_name(study)
    equal_time = at_equal_time(study)
    table_rows = []
    for name in _rows_in_order(study, places, by_name):
        seed_rows = by_name[name]
        near_cell = _near_cell(name, seed_rows, places)
        far_cells = [_far_cell(name, seed_rows, places)] if has_far else []
        window_cells = [_window_cell(name, length, seed_rows) for length in lengths]
        last_cells = [
            seed_rows[0].parameters or None,
            _speed_cell(seed_rows, equal_time),
            len(seed_rows),
        ]
        table_rows.append([name, near_cell, *far_cells, *window_cells, *last_cells])
    caption = f"Best first. {describe_detectable_difference(study)}"
    if has_far:
        caption += (
            f" The two judged columns are of different {units.length} of the text: compare rows, "
            "not columns."
        )
    return Table(header, table_rows, caption, as_cards=True, name="text")


def _rows_in_order(study: Study, places: Places, by_name: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the names of all rows, encodings best first; of each encoding the judged row first.

    by_name: every row, with each seed."""
    judged_names = set(places.far.order) if places.far else set()
    ordered_names = []
    for encoding in encodings_best_first(study):
        names = [name for name, seed_rows in by_name.items() if seed_rows[0].encoding == encoding]
        ordered_names += sorted(names, key=lambda name: name not in judged_names)
    return ordered_names


def _near_cell(name: str, seed_rows: Sequence[Row], places: Places) -> Value:
    """Return the cell of a row's mean loss at the training length, with its verdict if it is
    judged."""
    # A row that is only read in another way is judged near as the row that was trained.
    judged_name = places.near_row_of.get(name, name)
    if places.near is not None and judged_name in places.near.order:
        return _judged_cell(places.near, judged_name)
    if any(row.trial.train_length not in row.score_by_length for row in seed_rows):
        return None  # this way of reading was not tested at the training length
    losses = [row.near.bits_per_byte for row in seed_rows if row.near.bits_per_byte is not None]
    if len(losses) < len(seed_rows):  # the mean of some seeds is no mean of all
        reason = next(row.near.cannot for row in seed_rows if row.near.bits_per_byte is None)
        return _cell_without_loss(name, reason, seed_rows)
    return Number(fmean(losses), format_spec=".3f")


def _far_cell(name: str, seed_rows: Sequence[Row], places: Places) -> Value:
    """Return the cell of a row's mean loss on far bytes: with its verdict if it is judged. An
    encoding with failed trials has their number, and below it the mean of the others."""
    if places.far is not None and name in places.far.order:
        return _judged_cell(places.far, name)
    if name in places.unjudged_far_loss:
        return Number(places.unjudged_far_loss[name], format_spec=".3f")
    scores = _far_scores(seed_rows, max(seed_rows[0].trial.test_lengths))
    losses = [score.far for score in scores if score.far is not None]
    encoding = seed_rows[0].encoding
    if encoding in places.failure_counts:
        num_failed, num_planned = places.failure_counts[encoding]
        note_on_others = f"{fmean(losses):.3f} in the others" if losses else ""
        return Cell(f"failed {num_failed} of {num_planned}", second_line=note_on_others)
    if len(losses) < len(seed_rows):
        return Cell("–" if seed_rows[0].trial.is_of_table else "cannot")
    return Number(fmean(losses), format_spec=".3f")


def _judged_cell(standing: Standing, name: str) -> Cell:
    """Return the cell of a mean loss with its verdict, and its difference from the first in small
    letters."""
    verdict = standing.verdict(name)
    gap_text = "" if name == standing.order[0] else str(_gap_from_first(standing, name))
    return Cell(
        Number(standing.mean(name), format_spec=".3f", unit=f" {verdict}" if verdict else ""),
        strong=verdict in ("best", "tied"),
        second_line=gap_text,
        tone={"best": 1, "tied": 2}.get(verdict, 0),
    )


def _window_cell(name: str, length: int, seed_rows: Sequence[Row]) -> Value:
    """Return the cell of a row's mean loss over whole windows of one length; None, which prints as
    a dash, where the row was not read at that length: the readings "window" and "tuned" have the
    shortest and the longest only."""
    scores = [row.score_by_length[length] for row in seed_rows if length in row.score_by_length]
    if not scores:
        return None
    losses = [score.bits_per_byte for score in scores if score.bits_per_byte is not None]
    if len(losses) < len(scores):
        reason = next(score.cannot for score in scores if score.bits_per_byte is None)
        return _cell_without_loss(name, reason, seed_rows)
    return Number(fmean(losses), format_spec=".3f")


def _cell_without_loss(name: str, reason: str | None, seed_rows: Sequence[Row]) -> Cell:
    """Return the cell of a row at a length where it has no loss. Whether an encoding cannot run
    there is known of trials of compare, and not of those of a table, which has no more than it
    has."""
    is_of_table = seed_rows[0].trial.is_of_table
    return Cell("–" if is_of_table else "cannot", note=f"{name}: {reason}")


def _speed_cell(seed_rows: Sequence[Row], equal_time: EqualTime | None) -> Value:
    """Return the cell of the tokens a second of training: the median, and the range over the steps
    or the trials that were measured; None if not measured."""
    if equal_time is None or seed_rows[0].encoding not in equal_time.step_seconds:
        return None
    if not seed_rows[0].trial.batch:
        return None  # a table of losses does not say how many tokens a step has
    tokens_per_step = seed_rows[0].trial.batch * seed_rows[0].trial.train_length
    speeds = [
        tokens_per_step / seconds for seconds in equal_time.step_seconds[seed_rows[0].encoding]
    ]
    return _with_range(median(speeds), min(speeds), max(speeds), ",.0f")


def _with_range(value: float, lowest: float, highest: float, format_spec: str) -> Number:
    """Return a number with its range, if that is more than one value."""
    if lowest == highest:
        return Number(value, format_spec=format_spec)
    return Number(value, lowest, highest, format_spec)


def describe_detectable_difference(study: Study) -> str:
    """Return in words the least difference that the study could detect, near and far."""
    all_standings = standings(study)
    if all(len(standing.order) < 2 for standing in all_standings):
        return "With one encoding there is no difference."
    differences = []
    for standing in all_standings:
        least_difference = max(standing.least_significant_gap, standing.margin)
        if least_difference < math.inf:
            differences.append(
                f"{least_difference:.2f} {sentences.with_preposition(standing.where)}"
            )
    if not differences:
        return "Without two seeds that differ no difference has an interval."
    differences_in_words = ", ".join(differences)
    return f"Least difference that this study could detect among the best: {differences_in_words}."


def _gap_from_first(standing: Standing, name: str) -> Number:
    """Return the difference of an encoding from the first, and half of its interval if it has one:
    `+0.021 ± 0.010`."""
    gap = standing.gap(name)
    half_width_text = f" ± {gap.half_width:.3f}" if gap.half_width < math.inf else ""
    return Number(round(gap.value, 3) + 0.0, format_spec="+.3f", unit=half_width_text)


def curve_table(study: Study) -> Table:
    """Return what can be read from the curves, a row for each encoding."""
    saved_bits = falls_since_half(study.of_task(TEXT).finished)
    units = units_of(study)
    most_rise = f"{REACH_TOLERANCE - 1:.0%}"
    header = [
        "encoding",
        Heading("reach", f"{units.length} up to which the loss rises by at most {most_rise}"),
        Heading("fall in the last half", f"of the steps, {units.bits}, validation"),
    ]
    rows = []
    order = encodings_best_first(study)
    for summary in sorted(study.summary, key=lambda summary: order.index(summary.encoding)):
        saved_cell = (
            Number(saved_bits[summary.encoding], format_spec=".2f")
            if summary.encoding in saved_bits
            else None
        )
        rows.append([summary.encoding, summary.reach, saved_cell])
    return Table(header, rows, "What the curves show, by encoding.", as_cards=True, name="curves")


def seeds_table(standing: Standing, units: Units) -> Table:
    """Return a table of every seed, and of differences from the first with both intervals. units:
    of the text."""
    first = standing.order[0]
    rows = []
    for name in standing.order:
        value_by_seed = standing.pairs.values[name]
        values_text = " ".join(f"{value_by_seed[seed]:.3f}" for seed in sorted(value_by_seed))
        gap_over_windows = standing.gaps_over_windows.get((name, first))
        rows.append(
            [
                name,
                Number(standing.mean(name), format_spec=".3f"),
                Cell(values_text),
                None if name == first else _gap_from_first(standing, name),
                None if gap_over_windows is None else f"± {gap_over_windows.half_width:.3f}",
                standing.verdict(name),
            ]
        )
    header = [
        "encoding",
        "mean",
        "each seed",
        Heading(f"minus {first}", "± over other seeds"),
        Heading("in other windows", "± over windows of this text"),
        "verdict",
    ]
    place_slug = standing.where.replace(",", "").replace(" ", "-")
    caption = units.write(f"Bits per byte {sentences.with_preposition(standing.where)}.")
    return Table(header, rows, caption, as_cards=True, name=f"seeds-at-{place_slug}")


def reading_sections(study: Study) -> Iterator[Section]:
    """Yield the section of the rows of a text; nothing if no row has far losses, as in old
    results, which the section of the text then says."""
    rows = rows_of(study)
    if study.table is not None:
        equal_time = at_equal_time(study)
        if equal_time is not None:
            yield Section("What rows cost", [_table_of_costs(study, equal_time)])
        return
    if not any(row.far_by_length for row in rows):
        if any(len(row.trial.test_lengths) > 1 for row in rows):
            far_targets = f"far {units_of(study).length}"
            yield Section("", [f"Losses on {far_targets} alone were not measured in this run."])
        return
    yield Section("What far context saves, and what rows cost", [*_row_blocks(study, rows)])
    how_to_read = how_to_read_rows(rows[0].trial)
    yield Section("", [units_of(study).write(how_to_read)], is_detail=True)


def _row_blocks(study: Study, rows: Sequence[Row]) -> Iterator[Block]:
    """Yield the table of rows, and a note where the text has few windows."""
    trial = rows[0].trial
    longest_length = max(trial.test_lengths)
    equal_time = at_equal_time(study)
    units = units_of(study)
    header = [
        "row",
        Heading("near context", f"{units.bits}, {far_place_in_words(study)}"),
        Heading("far context saves", units.bits),
        Heading("context used", units.length),
        Heading("costs", _base_of_costs(equal_time)),
        Heading("equal time", f"{units.bits}, validation; range"),
    ]
    ordered_rows = sorted(
        rows_by_name(study).items(), key=lambda item: _sort_key(item[1], longest_length)
    )
    table_rows = [
        _table_row(name, seed_rows, longest_length, equal_time) for name, seed_rows in ordered_rows
    ]
    caption = "Lowest far loss first."
    if equal_time is not None:
        measured_at = (
            f"with {trial.precision} on the {trial.device} of this run at "
            f"{train_lengths_in_words(trial)} {units.length}"
        )
        caption += (
            f" Costs are multiples of {equal_time.cheapest}'s training time, {measured_at}; "
            "elsewhere they differ."
        )
    yield Table(header, table_rows, caption, as_cards=True, name="rows")
    window_counts = {
        len(row.far_by_length[longest_length].windows)
        for row in rows
        if row.far_by_length.get(longest_length)
    } - {0}
    if window_counts and max(window_counts) < (trial.num_windows or 0):
        yield (
            f"The far {units.length} are those of {max(window_counts)} windows, not "
            f"{trial.num_windows}: the test text has room for no more of {longest_length:,} "
            f"{units.length}, so its intervals are wide."
        )


def _table_of_costs(study: Study, equal_time: EqualTime) -> Table:
    """Return the table of rows whose losses another program measured: what their training cost."""
    header = [
        "row",
        Heading("costs", _base_of_costs(equal_time)),
        Heading("equal time", f"{units_of(study).bits}; range"),
    ]
    table_rows = [
        [name, *_time_cells(seed_rows, equal_time)]
        for name, seed_rows in rows_by_name(study).items()
    ]
    caption = f"Costs are multiples of {equal_time.cheapest}'s seconds in the table."
    return Table(header, table_rows, caption, as_cards=True, name="rows")


def _base_of_costs(equal_time: EqualTime | None) -> str:
    """Return in words of which training time the costs are multiples. By the ratios of steps in
    turns another encoding may cost a little less than this one: each is a median of its own."""
    base = "the cheapest" if equal_time is None else f"{equal_time.cheapest}'s"
    return f"times {base} training; range"


def _sort_key(rows: Sequence[Row], longest_length: int) -> tuple[float, float]:
    """Return the sort key of a row's seeds: far loss, then near loss; those without come last."""
    far_losses = [score.far for score in _far_scores(rows, longest_length) if score.far is not None]
    near_losses = [row.near.bits_per_byte for row in rows if row.near.bits_per_byte is not None]
    mean_far_loss = fmean(far_losses) if far_losses else math.inf
    mean_near_loss = fmean(near_losses) if near_losses else math.inf
    return mean_far_loss, mean_near_loss


def _far_scores(rows: Sequence[Row], longest_length: int) -> list[FarScore]:
    """Return the far scores at the longest length of those seeds that have one."""
    return [
        row.far_by_length[longest_length] for row in rows if longest_length in row.far_by_length
    ]


def _table_row(
    name: str, rows: Sequence[Row], longest_length: int, equal_time: EqualTime | None
) -> list[Value]:
    """Return the table's row of an encoding in a reading: means over seeds."""
    context_cells = _context_cells(name, rows, _far_scores(rows, longest_length))
    return [name, *context_cells, *_time_cells(rows, equal_time)]


def _context_cells(name: str, rows: Sequence[Row], scores: Sequence[FarScore]) -> list[Value]:
    """Return the three cells of a row on the context of far bytes: their loss with near context
    only, what far context saves, how many bytes of context the row uses. scores: those of the
    longest windows."""
    reason = next((score.cannot for score in scores if score.cannot), None)
    far_losses = [score.far for score in scores if score.far is not None]
    near_context_losses = [score.far_near for score in scores if score.far_near is not None]
    if reason is not None or not far_losses or not near_context_losses:
        return [Cell("cannot", note=f"{name}: {reason or 'not measured'}"), None, None]
    near_context_cell = Number(fmean(near_context_losses), format_spec=".3f")
    use = context_use(rows)
    if use is None:
        return [near_context_cell, None, None]
    half_width_text = "" if use.saved.half_width == math.inf else f" ± {use.saved.half_width:.3f}"
    saved_cell = Number(round(use.saved.value, 3) + 0.0, format_spec="+.3f", unit=half_width_text)
    return [near_context_cell, saved_cell, range_of_context(use) or None]


def _time_cells(rows: Sequence[Row], equal_time: EqualTime | None) -> list[Value]:
    """Return the cells of a row on time: what training costs, with its range, and the loss at equal
    time; None where time was not measured."""
    encoding = rows[0].encoding
    cost_ratio = (
        None if equal_time is None else equal_time.known_ratio(encoding, equal_time.cheapest)
    )
    if equal_time is None or cost_ratio is None:
        return [None, None]
    tuning_factor = median(
        row.seconds / row.trained_seconds if row.seconds else 1.0 for row in rows
    )
    estimate, lowest, highest = (tuning_factor * ratio for ratio in cost_ratio)
    cost_cell = _with_range(estimate, lowest, highest, ".2f")
    losses = equal_time.losses.get(encoding, {})
    # The curve is that of training as usual: other readings have none of their own.
    if not losses or rows[0].reading != "trained":
        return [cost_cell, None]
    mean_loss = fmean(losses.values())
    loss_ranges = equal_time.loss_ranges.get(encoding, {}).values()
    lowest_loss = min((low for low, _ in loss_ranges), default=mean_loss)
    highest_loss = max((high for _, high in loss_ranges), default=mean_loss)
    return [cost_cell, _with_range(mean_loss, lowest_loss, highest_loss, ".3f")]


MAX_TONE = 4
"""Colour of the fourth tier and all later ones; 1 is that of the best."""


def matrix_of_tasks(study: Study) -> Table:
    """Return a table with a row per encoding, best first, and a column per task."""
    standing_of_column = standing_by_column(study)
    ranks = ranks_without_a_task(study) if "all" in standing_of_column else {}
    summaries = {(row.encoding, row.task): row for row in study.tasks}
    rows = []
    for name in order_by_standings(study, standing_of_column.values()):
        row: list[Value] = [name]
        for column, standing in standing_of_column.items():
            second_line = ""
            if column == "all" and name in ranks:
                second_line = _rank_range(*ranks[name])
            elif (name, column) in summaries:
                second_line = _learned_text(summaries[name, column])
            row.append(_mean_cell(standing, name, second_line))
        summaries_of_name = [summary for summary in study.tasks if summary.encoding == name]
        num_learned_by_every_seed = sum(
            summary.learned == summary.num_seeds for summary in summaries_of_name
        )
        row.append(f"{num_learned_by_every_seed} of {len(study.sequence_tasks)}")
        rows.append(row)
    units = units_of(study)
    header = ["encoding", *(_heading_of_column(key, units) for key in standing_of_column)]
    header.append(Heading("tasks learned", "by every seed"))
    return Table(header, rows, "Best first.", as_cards=True, name="tasks")


def _heading_of_column(key: str, units: Units) -> Heading:
    """Return the heading of a column: its key is "all", a task, or a length of the text in
    words. units: of the text."""
    if key == "all":
        return Heading("all tasks", "mean rank, 1 is best")
    if key not in TASKS:
        return Heading(f"text, {key}", f"{units.bits}, lower is better")
    return Heading(key, TASKS[key].metric)


def _mean_cell(standing: Standing, name: str, second_line: str) -> Cell:
    """Return an encoding's mean, coloured by its tier if differences can be significant; a dash
    where it does not run."""
    if name not in standing.order:
        return Cell("–", second_line=second_line)
    is_decided = standing.pairs.least_significant_gap < math.inf
    tone = min(standing.tier(name), MAX_TONE) if is_decided else 0
    mean = Number(standing.mean(name), format_spec=".2f")
    return Cell(mean, second_line=second_line, tone=tone, strong=tone == 1)


def _rank_range(lowest: int, highest: int) -> str:
    """Return a range, or one number if both are the same, in brackets."""
    return f"({lowest})" if lowest == highest else f"({lowest}–{highest})"


def _learned_text(summary: TaskSummary) -> str:
    """Return how many trials of an encoding learned the task: `2/3`."""
    return f"{summary.learned}/{summary.num_seeds}"


def task_table(task: str, summaries: Sequence[TaskSummary], trial: TrialConfig) -> Table:
    """Return the table of one task: a row for each encoding, with its mean score at each length,
    and in small letters below the mean the score of each seed. The last rows have the scores of
    policies that answer without doing the task.

    trial: one of the study's, for the policies' scores.
    """
    definition = TASKS[task]
    header = [
        "encoding",
        Heading("learned", f"exact match of {LEAST_LEARNED_EXACT_MATCH} in distribution"),
        *(Heading(_case_name(case), definition.length_unit) for case in summaries[0].cases),
        Heading("parameters", "of the whole model"),
    ]
    rows = []
    for summary in summaries:
        score_cells = [_score_cell(summary, case) for case in summary.cases]
        rows.append([summary.encoding, _learned_text(summary), *score_cells, summary.parameters])
    for policy, levels in figures.levels_of_policies(task, summaries[0].cases, trial).items():
        rows.append(
            [policy, "no model", *(Number(level, format_spec=".3f") for level in levels), None]
        )
    caption = (
        f"The task {task}: {definition.title}. {definition.metric.capitalize()} by "
        f"{definition.length_unit}, the mean over all seeds, higher is better; the longest length "
        "of training first."
    )
    return Table(header, rows, caption, as_cards=True, name=f"scores-{task.replace('_', '-')}")


def _case_name(case: CaseSummary) -> str:
    """Return the name of a case: its length, and its variant if it is one."""
    return f"{case.length:,}, {case.variant}" if case.variant else f"{case.length:,}"


def _score_cell(summary: TaskSummary, case: CaseSummary) -> Cell:
    """Return the mean score of a case with that of every seed, or a note why there is none."""
    if case.mean is None:
        return Cell("cannot", note=f"{summary.encoding}: {case.cannot}")
    scores_in_words = ", ".join(f"{value:.2f}" for value in case.seeds)
    return Cell(Number(case.mean, format_spec=".3f"), second_line=scores_in_words)
