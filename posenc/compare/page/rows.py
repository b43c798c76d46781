"""The table of a text, best first, for the terminal and for the page."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from posenc.compare.judge.standing import Standing, standing_at, standings
from posenc.compare.judge.summary import context_gains, describe_gains
from posenc.compare.results import EncodingSummary, LengthSummary, Study


@dataclass(frozen=True)
class Loss:
    """One cell: the mean over seeds in bits per byte, and its verdict against the best at its
    length.

    mean: None where the encoding cannot run, and `cannot` has the reason.
    verdict: "best", "tied" or "worse"; "" at a length that is not tested, or without intervals.
    apart: the difference from the best, and half of its interval.
    """

    mean: float | None
    verdict: str = ""
    apart: str = ""
    cannot: str = ""


def best_first(study: Study) -> list[str]:
    """Return the encodings, best first at the longest length; those that run only at shorter ones
    come later."""
    return order_by_standings(study, reversed(standings(study)))


def order_by_standings(study: Study, ordered: Iterable[Standing]) -> list[str]:
    """Return all encodings, sorted by the first of these standings; those that it lacks are sorted
    by the next ones."""
    names: dict[str, None] = {}
    for standing in ordered:
        names |= dict.fromkeys(standing.order)
    return list(names | dict.fromkeys(study.encodings))


def text_rows(study: Study) -> list[tuple[EncodingSummary, list[Loss], str]]:
    """Return for each encoding, best first, its row of the summary, a cell for each test length,
    and what more context does in words."""
    lengths = study.trials[0].test_lengths
    standing_at_length = {n: standing_at(study, n) for n in lengths}
    # Only there the judge looks for significant differences.
    ends = (lengths[0], lengths[-1])
    order = best_first(study)
    rows = []
    for row in sorted(study.summary, key=lambda row: order.index(row.encoding)):
        losses = []
        for score in row.by_length:
            standing = standing_at_length[score.length]
            losses.append(
                _loss_of_score(standing, row.encoding, score, judged=score.length in ends)
            )
        rows.append((row, losses, describe_gains(context_gains(study, row.encoding))))
    return rows


def describe_detectable_difference(study: Study) -> str:
    """Return in words the least difference that the study could detect, at the training length and
    at the longest."""
    all_standings = standings(study)
    if all(len(standing.order) < 2 for standing in all_standings):
        return "With one encoding there is no difference."
    differences = []
    for standing in all_standings:
        least = standing.pairs.least
        if least < math.inf:
            differences.append(f"{least:.2f} at {standing.where}")
    if not differences:
        return "Without two seeds that differ no difference has an interval."
    found = ", ".join(differences)
    return f"Least difference that this study could detect among the best: {found}."


def verdict_of(standing: Standing, name: str) -> str:
    """Return "best", "tied" or "worse"; "" if nothing can be significant."""
    if standing.pairs.least == math.inf or len(standing.order) < 2:
        return ""
    if name not in standing.first:
        return "worse"
    return "best" if len(standing.first) == 1 else "tied"


def difference_from_first(standing: Standing, name: str) -> str:
    """Return the difference of an encoding from the first as text, and half of its interval if it
    has one: `+0.021 ± 0.010`."""
    gap = standing.gap(name)
    half = f" ± {gap.half:.3f}" if gap.half < math.inf else ""
    return f"{round(gap.value, 3) + 0.0:+.3f}{half}"


def _loss_of_score(
    standing: Standing | None, name: str, score: LengthSummary, judged: bool
) -> Loss:
    """Return the cell of an encoding at one length. judged: with its verdict against the best."""
    if score.mean is None:
        return Loss(None, cannot=score.cannot or "no reason given")
    if standing is None or name not in standing.order:
        return Loss(score.mean)
    if not judged:
        return Loss(standing.mean(name))
    apart = "" if name == standing.order[0] else difference_from_first(standing, name)
    return Loss(standing.mean(name), verdict_of(standing, name), apart)
