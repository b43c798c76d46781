"""Which encodings are told apart, and what that leaves of a ranking: rank intervals and tiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from posenc.statistics.estimate import LEVEL, Estimate
from posenc.statistics.holm import holm


@dataclass(frozen=True)
class Ranking:
    """What can be said of an order, all of it together with 95 %.

    order: the encodings by tier, and in a tier by their estimate, which means nothing there.
    ranks: the first and the last rank that an encoding may have.
    tiers: the first holds the encodings that are told to be behind none, each next one those that
        are told to be behind none but encodings of the tiers before.
    """

    order: tuple[str, ...]
    ranks: Mapping[str, tuple[int, int]]
    tiers: tuple[tuple[str, ...], ...]

    def tier(self, encoding: str) -> int:
        """Which tier, from 1."""
        return next(i for i, names in enumerate(self.tiers, 1) if encoding in names)


def rank(
    estimates: Mapping[str, float], differences: Mapping[tuple[str, str], Estimate]
) -> Ranking:
    """The order that the seeds carry.

    All pairs are tested at once with Holm's correction. An encoding's best rank is 1 plus the
    number that are told to be better, its worst leaves room for all that are not told to be worse;
    so are the intervals made that leaderboards of language models print. The tiers stand on what is
    told alone, and not on the estimates, which may be of trials that do not compare.

    Args:
        estimates: each encoding's score; higher is better.
        differences: score of the second minus score of the first, for each pair of encodings in the
            order of `estimates`.

    Raises: ValueError if a pair is missing.

    Source: Mogstad, Romano, Shaikh, Wilhelm 2023, Inference for Ranks, doi:10.1093/restud/rdad006;
    their R package csranks.

    >>> apart, close = Estimate(-1.0, 0.01, 4, 5), Estimate(-0.01, 0.01, 4, 5)
    >>> pairs = {("t5", "rope"): close, ("t5", "nope"): apart, ("rope", "nope"): apart}
    >>> found = rank({"t5": 0.9, "rope": 0.89, "nope": -0.1}, pairs)
    >>> found.tiers, found.ranks["rope"]
    ((('t5', 'rope'), ('nope',)), (1, 2))
    """
    names = list(estimates)
    pairs = list(combinations(names, 2))
    missing = [pair for pair in pairs if pair not in differences]
    if missing:
        raise ValueError(f"every pair of encodings needs its difference; without one: {missing}.")
    corrected = holm([differences[pair].p for pair in pairs])
    better = set()
    for (a, b), p in zip(pairs, corrected, strict=True):
        if p <= 1 - LEVEL:
            better.add((b, a) if differences[a, b].value > 0 else (a, b))
    ranks = {
        name: (
            1 + sum((other, name) in better for other in names),
            len(names) - sum((name, other) in better for other in names),
        )
        for name in names
    }
    tiers = _tiers(sorted(names, key=lambda name: -estimates[name]), better)
    return Ranking(tuple(name for tier in tiers for name in tier), ranks, tiers)


def _tiers(names: Sequence[str], better: set[tuple[str, str]]) -> tuple[tuple[str, ...], ...]:
    tiers, left = [], list(names)
    while left:
        # Pairs that stand on other trials may go round in a circle, which is one tier.
        first = [b for b in left if not any((a, b) in better for a in left)] or left
        tiers.append(tuple(first))
        left = [name for name in left if name not in first]
    return tuple(tiers)
