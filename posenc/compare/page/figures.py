"""The figures of a study, each a function of the study and the line style of every encoding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import log2
from statistics import fmean

from matplotlib.figure import Figure

from posenc.compare.results import PositionScore, Study, TrialResult
from posenc.report.page.chart import HIGH, LOW, Chart, Data, axes_of, parts, stacked
from posenc.report.page.drawing import HOVER, LineStyle, curves_by_length, figure, legend_above

Styles = Mapping[str, LineStyle]
BATCHES = ", training batches"
"""Ends the name of the curve of an encoding's losses on training batches."""


def chart_by_length(study: Study, styles: Styles) -> Chart:
    """Draw mean bits per byte at each test length; bars span the seeds."""
    curves = {}
    for row in study.summary:
        points = [
            (s.length, s.mean, s.mean - (s.spread or 0.0), s.mean + (s.spread or 0.0))
            for s in row.by_length
            if s.mean is not None
        ]
        if points:
            curves[row.encoding] = [*zip(*points, strict=True)]
    axes = "test length, bytes", "bits per byte"
    return _chart_over_lengths(
        study, stacked(*axes, curves, LOW, HIGH), styles, _tested_lengths(study)
    )


def chart_by_context(study: Study, styles: Styles) -> Chart:
    """Draw mean bits per byte of the same target bytes, by length of context."""

    def points(trial: TrialResult) -> list[tuple[float, float]]:
        return [
            (score.length, score.bits_per_byte)
            for score in trial.by_context
            if score.bits_per_byte is not None
        ]

    curves = {name: _mean_curve(trials, points) for name, trials in _trials_by_encoding(study)}
    shown = sorted({round(length) for lengths, _ in curves.values() for length in lengths})
    axes = "window that ends in the targets, bytes", "bits per byte"
    return _chart_over_lengths(study, stacked(*axes, curves), styles, shown)


def chart_by_position(study: Study, styles: Styles) -> Chart:
    """Draw mean bits per byte by position inside the longest window."""

    def points(trial: TrialResult) -> list[tuple[float, float]]:
        return _merge_position_scores(trial.by_position, trial.config.train_length)

    curves = {name: _mean_curve(trials, points) for name, trials in _trials_by_encoding(study)}
    longest = max(_tested_lengths(study))
    first = min([longest, *(middle for middles, _ in curves.values() for middle in middles)])
    first_doubling = max(0, round(log2(first)))
    doublings = [
        2**i for i in range(first_doubling, 40) if 2**i <= longest
    ]  # 2^40: longer than any
    ticks = doublings[:: 1 + len(doublings) // 9]  # at most nine, so that their labels fit
    axes = "position in the window, bytes", "bits per byte"
    return _chart_over_lengths(study, stacked(*axes, curves), styles, ticks)


def chart_of_training(study: Study, styles: Styles) -> Chart:
    """Draw bits per byte in training: validation with markers, batches as thin lines."""
    curves = {}
    for name, trials in _trials_by_encoding(study):
        curves[name] = _mean_curve(trials, lambda t: [(p.step, p.valid) for p in t.training])
        batches = _mean_curve(trials, lambda t: [(p.step, p.train) for p in t.training])
        curves[f"{name}{BATCHES}"] = batches
    table = stacked("training step", "bits per byte", curves)
    return Chart(table, partial(_draw_training, styles=styles))


def _draw_training(data: Data, styles: Styles) -> Figure:
    """Draw the curves of a table: those of validation with markers and names, and those of BATCHES
    as thin lines in the colours of their encodings."""
    x_label, y_label = axes_of(data)
    with figure(x_label, y_label) as (drawn, axes):
        for name, part in parts(data).items():
            if name in styles:
                look = styles[name].curve(len(part[x_label]))
                axes.plot(part[x_label], part[y_label], label=name, gid=HOVER + name, **look)
            else:
                colour = styles[name.removesuffix(BATCHES)].color
                thin = {"color": colour, "linewidth": 0.7, "alpha": 0.6}
                axes.plot(part[x_label], part[y_label], **thin)
        legend_above(drawn)
    return drawn


def _chart_over_lengths(study: Study, data: Data, styles: Styles, ticks: Sequence[int]) -> Chart:
    """Return a chart of curves over a logarithmic axis of lengths."""
    look = {"styles": styles, "ticks": ticks, "train_length": study.trials[0].train_length}
    return Chart(data, partial(curves_by_length, **look))


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
        total = sum(b.bits_per_byte * size for b, size in zip(group, sizes, strict=True))
        points.append(((group[0].start + group[-1].stop) / 2, total / sum(sizes)))
    return points


def _tested_lengths(study: Study) -> list[int]:
    """Return all test lengths of the study, in order."""
    return sorted({length for trial in study.trials for length in trial.test_lengths})


def _trials_by_encoding(study: Study) -> Iterable[tuple[str, list[TrialResult]]]:
    """Yield each encoding with its finished trials."""
    for encoding in study.encodings:
        trials = [t for t in study.finished if t.config.encoding == encoding]
        if trials:
            yield encoding, trials


def _mean_curve(
    trials: list[TrialResult], points: Callable[[TrialResult], list[tuple[float, float]]]
) -> tuple[list[float], list[float]]:
    """Return a mean curve, as its xs and ys: at every x that all trials have, the mean of their ys.

    points: returns the points (x, y) of a trial.
    """
    curves = [dict(points(trial)) for trial in trials]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return shared, [fmean(curve[x] for curve in curves) for x in shared]
