"""Rank intervals and tiers from significant differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from posenc.statistics.estimate import LEVEL, Estimate
from posenc.statistics.holm import holm


@dataclass(frozen=True)
class Ranking:
    """A ranking whose statements hold jointly with 95 %.

    order: the encodings by tier, then by estimate; order within a tier is not significant.
    ranks: the best and the worst possible rank of each encoding.
    tiers: the first has the encodings that are significantly worse than none, each next one those
        that are significantly worse only than encodings of earlier tiers.
    """

    order: tuple[str, ...]
    ranks: Mapping[str, tuple[int, int]]
    tiers: tuple[tuple[str, ...], ...]

    def tier(self, encoding: str) -> int:
        """Return the number of its tier, from 1."""
        return next(i for i, names in enumerate(self.tiers, 1) if encoding in names)


def rank(
    estimates: Mapping[str, float], differences: Mapping[tuple[str, str], Estimate]
) -> Ranking:
    """Rank encodings by significant differences.

    All pairs are tested with Holm's correction. An encoding's best rank is 1 plus the number of
    significantly better ones; its worst rank is the number of those that are not significantly
    worse, itself included. Leaderboards of language models use the same intervals. Tiers depend on
    significant differences only, not on estimates, which may be over different trials.

    Args:
        estimates: each encoding's score; higher is better.
        differences: score of the second minus score of the first, for each pair of encodings in the
            order of `estimates`.

    Raises: ValueError if the difference of a pair is missing.

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
        raise ValueError(f"every pair of encodings needs a difference; missing: {missing}.")
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
        # Pairs over different trials may form a cycle, which is one tier.
        first = [b for b in left if not any((a, b) in better for a in left)] or left
        tiers.append(tuple(first))
        left = [name for name in left if name not in first]
    return tuple(tiers)
