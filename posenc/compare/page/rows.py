"""The table of a text, best first, for the terminal and for the page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from posenc.compare.judge.standing import Standing, standing_at
from posenc.compare.judge.summary import context_gains, describe_gains
from posenc.compare.results import EncodingSummary, Study
from posenc.sentence import phrase


@dataclass(frozen=True)
class Loss:
    """One cell: the mean over seeds, and its verdict against the best at its length.

    verdict: "best", "tied" or "worse"; "" at a length that is not tested, or without intervals.
    apart: the difference from the best, and half of its interval.
    """

    mean: float | None
    verdict: str = ""
    apart: str = ""
    cannot: str = ""


@dataclass(frozen=True)
class Row:
    """Numbers of one encoding."""

    summary: EncodingSummary
    losses: Sequence[Loss]
    context: str


def standings(study: Study) -> list[Standing]:
    """Return the standings at the training length and at the longest, where an encoding runs."""
    config = study.trials[0]
    lengths = dict.fromkeys([config.train_length, max(config.test_lengths)])
    return [found for length in lengths if (found := standing_at(study, length)) is not None]


def best_first(study: Study) -> list[str]:
    """Sort encodings by the longest length; those that run only at shorter ones come later."""
    return in_order(study, reversed(standings(study)))


def in_order(study: Study, found: Iterable[Standing]) -> list[str]:
    """Sort encodings by the first of these standings, then by the next ones."""
    return list(dict.fromkeys([*(name for each in found for name in each.order), *study.encodings]))


def text_rows(study: Study) -> list[Row]:
    """Return a row for each encoding with a finished trial, best first."""
    found = {standing.where: standing for standing in standings(study)}
    bytes_ = "{length:,} bytes"
    order = best_first(study)
    return [
        Row(
            summary,
            [
                _loss(found.get(phrase(bytes_, length=score.length)), summary.encoding, score)
                for score in summary.by_length
            ],
            describe_gains(context_gains(study, summary.encoding)),
        )
        for summary in sorted(study.summary, key=lambda row: order.index(row.encoding))
    ]


def detectable(study: Study) -> str:
    """Say the least difference that the study could detect, at each tested length."""
    found = [
        phrase("{number:.2f} at {where}", number=each.pairs.least, where=each.where)
        for each in standings(study)
        if each.pairs.least < math.inf
    ]
    if not found:
        return phrase("Without two seeds that differ no difference has an interval.")
    least = "Least difference that this study could detect: {found}."
    return phrase(least, found=phrase(", ").join(found))


def verdict_of(standing: Standing, name: str) -> str:
    """Return "best", "tied" or "worse"; "" if nothing can be significant."""
    if standing.pairs.least == math.inf or len(standing.order) < 2:
        return ""
    if name not in standing.first:
        return "worse"
    return "best" if len(standing.first) == 1 else "tied"


def said(standing: Standing, name: str) -> str:
    """Write the difference from the first, and half of its interval if it has one."""
    gap = standing.gap(name)
    return f"{round(gap.value, 3) + 0.0:+.3f}" + (
        f" ± {gap.half:.3f}" if gap.half < math.inf else ""
    )


def _loss(standing: Standing | None, name: str, score) -> Loss:
    if score.mean is None:
        return Loss(None, cannot=score.cannot or phrase("no reason given"))
    if standing is None or name not in standing.order:
        return Loss(score.mean)
    apart = "" if name == standing.order[0] else said(standing, name)
    return Loss(score.mean, verdict_of(standing, name), apart)
