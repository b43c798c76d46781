"""The figures of a study, each a function of the study and the line style of every encoding."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import log2
from statistics import fmean

from matplotlib.figure import Figure

from posenc.compare.results import PositionScore, Study, TrialResult
from posenc.report.page.drawing import HOVER, LineStyle, figure, label_ends, length_axis
from posenc.sentence import phrase

Styles = Mapping[str, LineStyle]


def by_length(study: Study, styles: Styles) -> Figure:
    """Draw mean bits per byte at each test length; bars span the seeds."""
    with figure(phrase("test length, bytes"), phrase("bits per byte")) as (drawn, axes):
        for row in study.summary:
            points = [s for s in row.by_length if s.mean is not None]
            if points:
                bars = axes.errorbar(
                    [s.length for s in points],
                    [s.mean or 0.0 for s in points],
                    yerr=[s.spread or 0.0 for s in points],
                    label=row.encoding,
                    **styles[row.encoding].points(),
                )
                bars[0].set_gid(HOVER + row.encoding)
        length_axis(axes, _lengths(study), study.trials[0].train_length)
    label_ends(drawn, axes)
    return drawn


def by_context(study: Study, styles: Styles) -> Figure:
    """Draw mean bits per byte of the same target bytes, by length of context."""
    x_label = phrase("window that ends in the targets, bytes")
    with figure(x_label, phrase("bits per byte")) as (drawn, axes):
        shown: set[int] = set()
        for encoding, trials in _by_encoding(study):
            lengths, means = _mean_curve(
                trials,
                lambda t: [
                    (s.length, s.bits_per_byte) for s in t.by_context if s.bits_per_byte is not None
                ],
            )
            shown.update(round(length) for length in lengths)
            axes.plot(lengths, means, **_named(encoding), **styles[encoding].points())
        length_axis(axes, sorted(shown), study.trials[0].train_length)
    label_ends(drawn, axes)
    return drawn


def by_position(study: Study, styles: Styles) -> Figure:
    """Draw mean bits per byte by position inside the longest window."""
    x_label = phrase("position in the window, bytes")
    with figure(x_label, phrase("bits per byte")) as (drawn, axes):
        first = longest = max(_lengths(study))
        for encoding, trials in _by_encoding(study):
            middles, means = _mean_curve(
                trials, lambda t: _merged(t.by_position, t.config.train_length)
            )
            axes.plot(middles, means, **_named(encoding), **styles[encoding].curve(len(middles)))
            first = min([first, *middles])
        doublings = [2**i for i in range(max(0, round(log2(first))), 40) if 2**i <= longest]
        length_axis(axes, doublings[:: 1 + len(doublings) // 9], study.trials[0].train_length)
    label_ends(drawn, axes)
    return drawn


def training(study: Study, styles: Styles) -> Figure:
    """Draw bits per byte in training: validation with markers, batches as thin lines."""
    with figure(phrase("training step"), phrase("bits per byte")) as (drawn, axes):
        for encoding, trials in _by_encoding(study):
            steps, valid = _mean_curve(trials, lambda t: [(p.step, p.valid) for p in t.training])
            axes.plot(steps, valid, **_named(encoding), **styles[encoding].curve(len(steps)))
            steps, train = _mean_curve(trials, lambda t: [(p.step, p.train) for p in t.training])
            thin = {"color": styles[encoding].color, "linewidth": 0.7, "alpha": 0.6}
            axes.plot(steps, train, label=f"_{encoding}, training batches", **thin)
    label_ends(drawn, axes)
    return drawn


def _named(encoding: str) -> dict[str, str]:
    """Return the name of a line for its data, its end and its hover title."""
    return {"label": encoding, "gid": HOVER + encoding}


def _merged(buckets: Sequence[PositionScore], cut: int) -> list[tuple[float, float]]:
    """Middles and means of wider buckets, each a quarter longer than what lies before it, so that
    noise does not hide the curve; none spans the position `cut`."""
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


def _lengths(study: Study) -> list[int]:
    return sorted({length for trial in study.trials for length in trial.test_lengths})


def _by_encoding(study: Study) -> Iterable[tuple[str, list[TrialResult]]]:
    """Yield each encoding with its finished trials."""
    for encoding in study.encodings:
        trials = [t for t in study.finished if t.config.encoding == encoding]
        if trials:
            yield encoding, trials


def _mean_curve(
    trials: list[TrialResult], points: Callable[[TrialResult], list[tuple[float, float]]]
) -> tuple[list[float], list[float]]:
    """Return the mean over trials at every x that all of them have."""
    curves = [dict(points(trial)) for trial in trials]
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    return shared, [fmean(curve[x] for curve in curves) for x in shared]
