"""A standing as rows of words: tier, loss, every seed, rank, differences from the anchors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from posenc.compare.judge.standing import ANCHORS, Standing, standing_at
from posenc.compare.results import Study
from posenc.statistics.estimate import Estimate

MEANING = (
    "A tier holds what is told to be behind none but encodings of the tiers before it; the order "
    "inside it means nothing. "
    "The rank is an interval: with 95 % all of them hold together (Holm over all pairs, Student's "
    "t on the differences of equal seeds). A column of an anchor gives the loss minus the "
    "anchor's, its 95 % interval, and p corrected by Holm for all anchors; negative is better "
    "than the anchor."
)


def standings(study: Study) -> list[Standing]:
    """At the training length and at the longest one; none with one seed, which tells nothing."""
    config = study.trials[0]
    lengths = dict.fromkeys([config.train_length, max(config.test_lengths)])
    found = [standing_at(study, length) for length in lengths]
    return [
        each
        for each in found
        if each and len(each.losses) > 1 and max(map(len, each.losses.values())) > 1
    ]


def header(standing: Standing) -> list[str]:
    """Names of the columns."""
    return ["encoding", "tier", "mean", "each seed", "rank", *map(_against, anchors(standing))]


def anchors(standing: Standing) -> list[str]:
    """The anchors that are in the study."""
    return [name for name in ANCHORS if any(name == anchor for anchor, _ in standing.anchors)]


def rows(standing: Standing) -> Iterator[list[str]]:
    """One row per encoding, by tier."""
    for name in standing.ranking.order:
        low, high = standing.ranking.ranks[name]
        each = (f"{standing.losses[name][s]:.3f}" for s in sorted(standing.losses[name]))
        yield [
            name,
            str(standing.ranking.tier(name)),
            f"{standing.mean(name):.3f}",
            " ".join(each),
            f"{low}" if low == high else f"{low}–{high}",
            *(from_anchor(standing.anchors, anchor, name) for anchor in anchors(standing)),
        ]


def _against(anchor: str) -> str:
    return f"against {anchor}"


def from_anchor(
    anchors: Mapping[tuple[str, str], tuple[Estimate, float]],
    anchor: str,
    name: str,
    unknown: str = "no spread",
) -> str:
    """What `against_anchors` found of an encoding and an anchor: the encoding minus the anchor, its
    interval and p, or why there is none: one seed, or what `unknown` says."""
    if anchor == name:
        return "–"
    if (anchor, name) in anchors:
        found, p = anchors[anchor, name]
        gap = found.value
    else:  # two anchors are compared once
        found, p = anchors[name, anchor]
        gap = -found.value
    if not found.count:
        return "no seed of both"
    if found.half == math.inf:
        return f"{gap:+.3f}, {unknown if found.count > 1 else 'one seed'}"
    shown = "p < 0.001" if p < 0.001 else f"p {p:.2g}"
    return f"{gap:+.3f} ± {found.half:.3f}, {shown}"
