"""Who is first: how the encodings of a study stand at one length, by their paired seeds.

All that is said or shown of an order asks `who_is_first`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from posenc.compare.results import Study
from posenc.statistics.anchors import against_anchors
from posenc.statistics.estimate import Estimate
from posenc.statistics.paired import paired_difference
from posenc.statistics.ranks import Ranking, rank

ANCHORS = ("rope", "alibi", "nope")
"""Named before any trial runs, so that a comparison with them pays for no others."""


@dataclass(frozen=True)
class First:
    """Who is first in a ranking.

    names: one that is significantly better than all others, or all that may be the best.
    behind: the others.
    """

    names: tuple[str, ...]
    behind: tuple[str, ...]


def may_be_best(ranking: Ranking) -> tuple[str, ...]:
    """Those than which none is significantly better; none where they go round in a circle."""
    return tuple(name for name in ranking.order if ranking.ranks[name][0] == 1)


def who_is_first(ranking: Ranking) -> First:
    """The best encoding, or those that the seeds cannot separate from it.

    One that nothing beats, and that does not beat all others, is no winner: those are named with it
    that its interval of ranks leaves room for.
    """
    names = may_be_best(ranking) or ranking.order
    if len(names) == 1 and ranking.ranks[names[0]] != (1, 1):
        worst = ranking.ranks[names[0]][1]
        names = tuple(name for name in ranking.order if ranking.ranks[name][0] <= worst)
    return First(names, tuple(name for name in ranking.order if name not in names))


@dataclass(frozen=True)
class Standing:
    """Losses at one window length, and what the seeds carry of their order.

    losses: bits per byte by encoding and seed, of the encodings that can run there and were
        checked.
    ranking: all pairs, corrected by Holm.
    anchors: for (anchor, encoding) the loss of the encoding minus that of the anchor, and its
        p-value, corrected by Holm for these comparisons.
    """

    length: int
    losses: Mapping[str, Mapping[int, float]]
    ranking: Ranking
    anchors: Mapping[tuple[str, str], tuple[Estimate, float]]

    @property
    def first(self) -> tuple[str, ...]:
        """The encoding with the lowest loss, or those that may have it."""
        return who_is_first(self.ranking).names

    def mean(self, encoding: str) -> float:
        return fmean(self.losses[encoding].values())

    def difference(self, a: str, b: str) -> Estimate:
        """Loss of `b` minus loss of `a`, over the seeds of both."""
        return _difference(self.losses, a, b)


def standing_at(study: Study, length: int) -> Standing | None:
    """None where no encoding can run at this length."""
    losses: dict[str, dict[int, float]] = {}
    own = set()
    for result in study.finished:
        name = result.config.encoding
        if name in study.unchecked:
            continue
        for score in result.by_length:
            if score.length == length and score.bits_per_byte is not None:
                losses.setdefault(name, {})[result.config.seed] = score.bits_per_byte
        if not result.config.code:
            own.add(name)
    losses = {name: losses[name] for name in study.encodings if name in losses}
    if not losses:
        return None
    ranking = rank(
        {name: -fmean(seeds.values()) for name, seeds in losses.items()},
        {(a, b): _difference(losses, b, a) for a, b in combinations(losses, 2)},
    )
    anchors = [name for name in ANCHORS if name in own]  # not a class of the user's of that name
    found = against_anchors(list(losses), anchors, lambda a, b: _difference(losses, a, b))
    return Standing(length, losses, ranking, found)


def _difference(losses: Mapping[str, Mapping[int, float]], a: str, b: str) -> Estimate:
    seeds = sorted(losses[a].keys() | losses[b].keys())
    left, right = ([losses[name].get(s, math.nan) for s in seeds] for name in (a, b))
    return paired_difference(left, right)
