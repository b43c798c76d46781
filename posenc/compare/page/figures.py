"""The figures of a study, each a table and its drawing."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import log2
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from posenc.compare.judging.context_use import far_by_context, losses_by_context
from posenc.compare.judging.near_far import encodings_best_first, standing_by_column
from posenc.compare.judging.standing import (
    Standing,
    order_by_standings,
    scores_of_task,
    standing_at,
)
from posenc.compare.judging.summary import group_by_task, has_learned
from posenc.compare.judging.units import Units, units_of
from posenc.compare.results import CaseSummary, PositionScore, Study, TaskSummary, TrialResult
from posenc.compare.rows import Row, row_name, rows_by_name
from posenc.compare.trial.config import TrialConfig
from posenc.report.chart import HIGH, LOW, Chart, Data, axis_names, long_table, split_by_series
from posenc.report.drawing import (
    HOVER_PREFIX,
    LineStyle,
    draw_curves_by_length,
    draw_legend_above,
    figure,
    line_styles,
    ranked_styles,
)
from posenc.report.report import Plot
from posenc.tasks.registry import TASKS
from posenc.tasks.scoring import policy_scores
from posenc.tasks.task import Case

Styles = Mapping[str, LineStyle]
MAX_ENCODINGS_DRAWN = 24
"""Encodings of a figure, the best ones: of more curves nobody could follow one. Chosen."""
NO_MODEL = "no model: best policy"
"""Name of the curve of the best policy that answers without doing the task."""
BATCHES_SUFFIX = ", training batches"
"""Ends the name of the curve of an encoding's losses on training batches."""
_HOW_WINDOWS_LIE = ", over windows of that length that do not overlap"
_LOSS_BY_LENGTH = (
    f"Loss by test length{_HOW_WINDOWS_LIE}; broken lines are other readings of the same trials."
)
_CAPTION_BY_LENGTH = (
    f"{_LOSS_BY_LENGTH} Bars are half of the 95 % interval of a difference from the lowest: where "
    "the bars of two do not overlap, they differ significantly."
)
_CAPTION_BY_TASK = (
    "The task {task} by length, mean over all seeds. “{no_model}”: the best of chance, pairs of "
    "tokens, a bag of words, elimination and the task's own shortcuts, none of which does the task."
)
_CAPTION_BY_WINDOW = (
    "Loss of far bytes, those at the end of long windows, by length of the window; first with near "
    "context only. A line that falls uses what it is shown; a flat line ignores it."
)
_CAPTION_WITHOUT_BARS = f"{_LOSS_BY_LENGTH} No bars: no difference has an interval."


class LossCurves(NamedTuple):
    """The curves of a figure of losses in bits per byte, before they are drawn.

    name: of the figure.
    x_label: what the losses are shown over, the label of the axis.
    curves: the columns of each curve by its name: x and bits per byte, and with bars their ends.
    draw: makes the figure from the table of the curves and the argument `styles`.
    has_bars: True if the columns LOW and HIGH follow in each curve.
    y_label: the unit of the losses.
    """

    name: str
    caption: str
    x_label: str
    curves: Mapping[str, Sequence[Sequence[float]]]
    draw: Callable[..., Figure]
    has_bars: bool = False
    y_label: str = Units().bits

    def for_units(self, units: Units) -> "LossCurves":
        """Return the curves with their words, which are those of bytes, in these units."""
        return self._replace(
            caption=units.write(self.caption),
            x_label=units.write(self.x_label),
            y_label=units.bits,
        )


def curve_plots(study: Study) -> Iterator[Plot]:
    """Yield the four figures of a text: losses by length, by context, by position, and in
    training; of a table of losses those for which it has curves."""
    all_curves = [
        losses_by_length(study),
        _losses_by_window(study),
        _losses_by_position(study),
        _losses_in_training(study),
    ]
    names = encodings_best_first(study)
    drawn_names = names[:MAX_ENCODINGS_DRAWN]
    styles = _with_readings(ranked_styles(drawn_names))
    note = _note_on_drawn(names)
    units = units_of(study)
    for loss_curves in (curves.for_units(units) for curves in all_curves):
        num_points = [len(columns[0]) for columns in loss_curves.curves.values()]
        if study.table is not None and max(num_points, default=0) < 2:
            continue
        chart = chart_of_losses(loss_curves, styles)
        yield Plot(chart, loss_curves.caption + note, name=loss_curves.name)


def _note_on_drawn(names: Sequence[str]) -> str:
    """Return the sentence that ends the caption of a figure without some of these encodings; "" if
    it has all of them."""
    if len(names) <= MAX_ENCODINGS_DRAWN:
        return ""
    return f" Drawn are the best {MAX_ENCODINGS_DRAWN} of {len(names):,} encodings."


def chart_of_losses(loss_curves: LossCurves, styles: Styles) -> Chart:
    """Return the chart of the curves that have a style. styles: by the name of a curve."""
    ends_of_bars = (LOW, HIGH) if loss_curves.has_bars else ()
    drawn_curves = {
        name: columns
        for name, columns in loss_curves.curves.items()
        if name.removesuffix(BATCHES_SUFFIX) in styles
    }
    table = long_table(loss_curves.x_label, loss_curves.y_label, drawn_curves, *ends_of_bars)
    return Chart(table, partial(loss_curves.draw, styles=styles))


def task_plots(study: Study) -> Iterator[Plot]:
    """Yield a figure of each task by length, and one of all trials as dots."""
    all_names = order_by_standings(study, standing_by_column(study).values())
    names = all_names[:MAX_ENCODINGS_DRAWN]
    note = _note_on_drawn(all_names)
    styles = ranked_styles([*names, NO_MODEL])
    for task, summaries in group_by_task(study.tasks):
        trial = study.of_task(task).trials[0]
        drawn_summaries = [summary for summary in summaries if summary.encoding in names]
        yield Plot(
            chart_of_task(task, drawn_summaries, styles, trial),
            _CAPTION_BY_TASK.format(task=task, no_model=NO_MODEL) + note,
            name=f"task-{task.replace('_', '-')}",
        )
    yield Plot(
        chart_of_every_trial(study, names),
        "The score of every trial beyond the training length, one dot for each seed and task; a "
        "cross for one that has not learned its task. Dots of one kind that lie far apart are "
        f"seeds that disagree.{note}",
        name="every-trial",
    )


def _with_readings(styles: Styles) -> Styles:
    """Return the styles, and for each encoding those of its other readings: the same colour and
    marker on a broken line."""
    styles_of_readings = {}
    for name, line_style in styles.items():
        styles_of_readings[row_name(name, "window")] = line_style._replace(linestyle=(0, (4, 2)))
        styles_of_readings[row_name(name, "tuned")] = line_style._replace(linestyle=(0, (1, 1)))
    return {**styles, **styles_of_readings}


def _rows_in_other_readings(study: Study) -> dict[str, list[Row]]:
    """Return the rows that are not read as trained, by name."""
    by_name = rows_by_name(study)
    return {name: rows for name, rows in by_name.items() if rows[0].reading != "trained"}


def losses_by_length(study: Study) -> LossCurves:
    """Return the curves of mean bits per byte at each test length; bars are half of
    the 95 % interval of the difference from the lowest; the lowest has the bar of the nearest
    other. There is no bar where a difference has no interval, and for other readings."""
    points_by_name = _points_as_trained(study)
    for name, rows in _rows_in_other_readings(study).items():
        points_by_name[name] = _points_of_reading(rows)
    curves = {
        name: [*zip(*points, strict=True)] for name, points in points_by_name.items() if points
    }
    caption = _CAPTION_WITHOUT_BARS
    for _, _, lows, highs in curves.values():
        if any(low < high for low, high in zip(lows, highs, strict=True)):
            caption = _CAPTION_BY_LENGTH
    if study.table is not None:  # of other programs' windows no more is known
        caption = caption.replace(_HOW_WINDOWS_LIE, "")
    draw = _draw_over_lengths(study, _tested_lengths(study))
    return LossCurves("by-length", caption, "test length, bytes", curves, draw, has_bars=True)


PointWithBar = tuple[float, float, float, float]
"""A test length, the mean loss there, and the ends of its bar."""


def _points_as_trained(study: Study) -> dict[str, list[PointWithBar]]:
    """Return the points of each encoding read as trained, in the order of the study."""
    points_by_name: dict[str, list[PointWithBar]] = {name: [] for name in study.encodings}
    for length in _tested_lengths(study):
        standing = standing_at(study, length)
        if standing is None:
            continue
        for name in standing.order:
            mean = standing.mean(name)
            half_of_bar = half_bar(standing, name)
            points_by_name[name].append((length, mean, mean - half_of_bar, mean + half_of_bar))
    return points_by_name


def _points_of_reading(rows: Sequence[Row]) -> list[PointWithBar]:
    """Return the points of a row in another reading, without bars, at lengths that all its seeds
    have. rows: the row with each seed."""
    points = []
    for length in rows[0].score_by_length:
        losses = [row.score_by_length[length].bits_per_byte for row in rows]
        known_losses = [bits for bits in losses if bits is not None]
        if known_losses and len(known_losses) == len(rows):
            mean = fmean(known_losses)
            points.append((length, mean, mean, mean))
    return points


def half_bar(standing: Standing, name: str) -> float:
    """Return half of a bar: half of the half-width of the interval of a difference from the first,
    so that bars of two that differ significantly do not overlap; 0 without an interval."""
    first, *others = standing.order
    if not others:
        return 0.0
    gap = standing.gap(name, first) if name != first else standing.gap(others[0], first)
    return gap.half_width / 2 if math.isfinite(gap.half_width) else 0.0


def _losses_by_window(study: Study) -> LossCurves:
    """Return the curves of mean bits per byte of far bytes, by length of the window that ends in
    them; at the training length with near context only. Old results lack far bytes: theirs are the
    bytes that they read with several lengths of context."""

    def points_of_trial(trial: TrialResult) -> list[tuple[float, float]]:
        return [*losses_by_context(trial).items()]

    curves = {
        name: _mean_curve(trials, points_of_trial) for name, trials in _trials_by_encoding(study)
    }
    for name, rows in _rows_in_other_readings(study).items():
        by_seed = [
            far_by_context(row.far_by_length, row.by_context, row.trial.train_length)
            for row in rows
        ]
        shared_lengths = sorted(set.intersection(*map(set, by_seed)))
        curves[name] = (
            shared_lengths,
            [fmean(losses[length] for losses in by_seed) for length in shared_lengths],
        )
    curves = {name: curve for name, curve in curves.items() if curve[0]}
    shown_lengths = sorted({round(length) for lengths, _ in curves.values() for length in lengths})
    return LossCurves(
        "by-context",
        _CAPTION_BY_WINDOW,
        "window that ends in the targets, bytes",
        curves,
        _draw_over_lengths(study, shown_lengths),
    )


def _losses_by_position(study: Study) -> LossCurves:
    """Return the curves of mean bits per byte by position inside the longest window."""

    def points_of_trial(trial: TrialResult) -> list[tuple[float, float]]:
        return _merge_position_scores(trial.by_position, trial.config.train_length)

    curves = {
        name: _mean_curve(trials, points_of_trial) for name, trials in _trials_by_encoding(study)
    }
    longest = max(_tested_lengths(study))
    first_position = min(
        [longest, *(middle for middles, _ in curves.values() for middle in middles)]
    )
    first_doubling = max(0, round(log2(first_position)))
    doublings = [
        2**i for i in range(first_doubling, 40) if 2**i <= longest
    ]  # 2^40: longer than any
    ticks = doublings[:: 1 + len(doublings) // 9]  # at most nine, so that their labels fit
    return LossCurves(
        "by-position",
        "Loss by position inside the longest window that an encoding can run.",
        "position in the window, bytes",
        curves,
        _draw_over_lengths(study, ticks),
    )


def _losses_in_training(study: Study) -> LossCurves:
    """Return the curves of bits per byte in training: of validation, and of training batches with
    BATCHES_SUFFIX behind their name."""
    curves = {}
    for name, trials in _trials_by_encoding(study):
        curves[name] = _mean_curve(trials, lambda t: [(p.step, p.valid) for p in t.training])
        batch_curve = _mean_curve(trials, _losses_on_batches)
        if batch_curve[0]:
            curves[f"{name}{BATCHES_SUFFIX}"] = batch_curve
    caption = "Training: validation text with markers, training batches as thin lines."
    return LossCurves("training", caption, "training step", curves, _draw_training)


def _losses_on_batches(trial: TrialResult) -> list[tuple[float, float]]:
    """Return the steps of a trial's curve with the losses on training batches, as far as they are
    known."""
    return [(point.step, point.train) for point in trial.training if point.train is not None]


def _draw_training(data: Data, styles: Styles) -> Figure:
    """Draw the curves of a table: those of validation with markers and names, and those of
    BATCHES_SUFFIX as thin lines in the colours of their encodings."""
    x_label, y_label = axis_names(data)
    with figure(x_label, y_label) as (drawn_figure, axes):
        for name, data_of_curve in split_by_series(data).items():
            if name in styles:
                curve_arguments = styles[name].arguments_for_curve(len(data_of_curve[x_label]))
                axes.plot(
                    data_of_curve[x_label],
                    data_of_curve[y_label],
                    label=name,
                    gid=HOVER_PREFIX + name,
                    **curve_arguments,
                )
            else:
                colour = styles[name.removesuffix(BATCHES_SUFFIX)].color
                thin_line = {"color": colour, "linewidth": 0.7, "alpha": 0.6}
                axes.plot(data_of_curve[x_label], data_of_curve[y_label], **thin_line)
        draw_legend_above(drawn_figure)
    return drawn_figure


def chart_of_task(
    task: str, summaries: Sequence[TaskSummary], styles: Styles, trial: TrialConfig
) -> Chart:
    """Return the chart of each encoding's mean score on a task by test length, without the task's
    variants, and of the best policy that answers without doing the task."""
    definition = TASKS[task]
    curves = {}
    for row in summaries:
        points = {c.length: c.mean for c in row.cases if not c.variant and c.mean is not None}
        curves[row.encoding] = ([*points], [*points.values()])
    usual_cases = [case for case in summaries[0].cases if not case.variant]
    if levels_by_policy := levels_of_policies(task, usual_cases, trial):
        best_levels = [max(at_length) for at_length in zip(*levels_by_policy.values(), strict=True)]
        curves[NO_MODEL] = [case.length for case in usual_cases], best_levels
    tested_lengths = sorted({length for lengths, _ in curves.values() for length in lengths})
    curve_arguments = {
        "styles": styles,
        "ticks": tested_lengths,
        "train_length": min(tested_lengths),
    }
    data = long_table(f"test length, {definition.length_unit}", definition.metric, curves)
    return Chart(data, partial(draw_curves_by_length, **curve_arguments))


def levels_of_policies(
    task: str, cases: Sequence[CaseSummary], trial: TrialConfig
) -> dict[str, list[float]]:
    """Return the score in each case of the policies that answer without doing the task, by name; {}
    for results of a recipe in which the task had other sequences."""
    if trial.recipe < TASKS[task].since_recipe:
        return {}
    scores_by_case = [
        policy_scores(task, Case(case.length, case.variant), trial.train_length) for case in cases
    ]
    return {
        policy: [scores_of_case[policy] for scores_of_case in scores_by_case]
        for policy in scores_by_case[0]
    }


def chart_of_every_trial(study: Study, names: Sequence[str]) -> Chart:
    """Return the chart of the score of every trial: a row per encoding, in the order of `names`, a
    marker per task."""
    learned_configs = {result.config for result in study.finished if has_learned(result)}
    dots = []
    for task in study.sequence_tasks:
        scores = scores_of_task(study, task)
        for trial in study.of_task(task).trials:
            by_seed = scores.get(trial.encoding, {})
            if trial.seed in by_seed and trial.encoding in names:
                is_learned = trial in learned_configs
                dots.append((task, by_seed[trial.seed], trial.encoding, trial.seed, is_learned))
    score_label = "score beyond the training length"
    header = ("task", score_label, "encoding", "seed", "learned")
    columns = zip(*dots, strict=True) if dots else ((),) * len(header)
    data: Data = dict[str, Any](zip(header, columns, strict=True))
    from_below = names[::-1]
    return Chart(data, partial(_draw_trials, names=from_below, tasks=study.sequence_tasks))


def _draw_trials(data: Data, names: Sequence[str], tasks: Sequence[str]) -> Figure:
    """Draw the table of `chart_of_every_trial`: a row for each of `names`, from below, and in it a
    marker for each trial, of another shape and colour for each task; a cross if it is not
    learned."""
    height = 1.0 + 0.32 * len(names)  # inches: axis and legend, and each row; chosen
    styles = line_styles(tasks)
    _, score_label, *_ = data
    with figure(score_label, "", height=height) as (drawn_figure, axes):
        for i, task in enumerate(tasks):
            line_style = styles[task]
            shift = 0.6 * ((i + 0.5) / len(tasks) - 0.5)  # equal scores hide no other
            for is_learned_marker, marker in ((True, line_style.marker), (False, "x")):
                points = [
                    (score, names.index(name) - shift)
                    for task_of_dot, score, name, is_learned in zip(
                        data["task"],
                        data[score_label],
                        data["encoding"],
                        data["learned"],
                        strict=True,
                    )
                    if task_of_dot == task and is_learned == is_learned_marker
                ]
                x, y = zip(*points, strict=True) if points else ((), ())
                legend_label = task if is_learned_marker else None
                axes.scatter(
                    x, y, s=22, marker=marker, color=line_style.color, label=legend_label, alpha=0.8
                )
        axes.scatter((), (), s=22, marker="x", color="gray", label="not learned")
        axes.set_yticks(range(len(names)), names)
        axes.set_xlim(-0.03, 1.03)  # whole markers at the scores 0 and 1
        draw_legend_above(drawn_figure)
    return drawn_figure


def _draw_over_lengths(study: Study, ticks: Sequence[int]) -> Callable[..., Figure]:
    """Return what draws curves over a logarithmic axis of lengths, the field of `LossCurves`."""
    train_length = study.trials[0].train_length
    return partial(draw_curves_by_length, ticks=ticks, train_length=train_length)


def _merge_position_scores(buckets: Sequence[PositionScore], cut: int) -> list[tuple[float, float]]:
    """Join neighbouring buckets of positions into wider ones, so that noise does not hide the
    curve. Return the middle position of each and its mean bits per byte.

    A wider bucket ends at most a quarter behind its start (chosen). None spans the position `cut`,
    at which the curve may jump.
    """
    groups: list[list[PositionScore]] = []
    for bucket in buckets:
        if groups and bucket.start != cut and bucket.stop <= 1.25 * groups[-1][0].start:
            groups[-1].append(bucket)
        else:
            groups.append([bucket])
    points = []
    for group in groups:
        sizes = [bucket.stop - bucket.start for bucket in group]
        total_bits = sum(b.bits_per_byte * size for b, size in zip(group, sizes, strict=True))
        points.append(((group[0].start + group[-1].stop) / 2, total_bits / sum(sizes)))
    return points


def _tested_lengths(study: Study) -> list[int]:
    """Return all test lengths of the study, in order."""
    return sorted({length for trial in study.trials for length in trial.test_lengths})


def _trials_by_encoding(study: Study) -> Iterable[tuple[str, list[TrialResult]]]:
    """Yield each encoding with its finished trials."""
    results_of_encoding: dict[str, list[TrialResult]] = {name: [] for name in study.encodings}
    for result in study.finished:
        results_of_encoding[result.config.encoding].append(result)
    for encoding, results in results_of_encoding.items():
        if results:
            yield encoding, results


def _mean_curve(
    trials: list[TrialResult], points_of_trial: Callable[[TrialResult], list[tuple[float, float]]]
) -> tuple[list[float], list[float]]:
    """Return a mean curve, as its xs and ys: at every x that all trials have, the mean of their ys.

    points_of_trial: returns the points (x, y) of a trial.
    """
    curves = [dict(points_of_trial(trial)) for trial in trials]
    shared_xs = sorted(set.intersection(*(set(curve) for curve in curves)))
    return shared_xs, [fmean(curve[x] for curve in curves) for x in shared_xs]
