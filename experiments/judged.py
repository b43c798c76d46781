"""How often the answer of a comparison names a wrong encoding, and how often it finds a right one.

python experiments/judged.py

Each row of results/ablations/judged.csv is a world of simulated studies that posenc's own judge
reads: near and far losses of 2 to 13 encodings in 2 or 3 seeds. Spreads over seeds are those of
the published trials (results/leaderboard and results/ablations/text_600.jsonl); far bytes are the
last 128 of 1,024 there. Worlds: "published", each encoding with the spread of one that was
published; "families", the same, and encodings of a family share most of their seeds' noise;
"tenfold", one encoding with ten times the spread of a published one; "failures", each trial fails
with 10 %. Columns:

wrong: studies in which the answer says "use" or "leads" for an encoding, near or far, that is
    worse than the best by more than the margin. The most of two truths: all are worse than the
    best by 0.025 bits; all differ at random by 0.05.
named_near, named_far: studies in which the best leads by 0.1 bits or more and is named, or has
    failed, or all others have. Far, every third of the others breaks, as RoPE does.
differ: studies of equal encodings in which any pair differs, near or far.

Takes about ten minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from published_trials import read_rows
from refused import check_file, refusing
from tables import write_table

from posenc.compare import results
from posenc.compare.judging.judgement import TIED, DriftOfLeads, choose
from posenc.compare.judging.near_far import far_loss, places_of
from posenc.compare.judging.standing import MARGIN
from posenc.compare.results import TrialResult
from posenc.compare.rows import rows_of

ROOT = Path(__file__).parents[1]
BOARDS = ("leaderboard/code.jsonl", "leaderboard/novel.jsonl", "ablations/text_600.jsonl")
HEADER = ("world", "encodings", "seeds", "wrong", "named_near", "named_far", "differ")
WORLDS = ("published", "families", "tenfold", "failures")
ENCODINGS, SEEDS = (2, 3, 6, 13), (2, 3)
STUDIES = 300
BREAKS = 0.3
"""Bits by which far losses are above near ones where an encoding breaks."""
LEAD = 0.1
SHARED = 0.7
"""Share of the variance over seeds that a family shares."""
FAILS = 0.1


class Spreads(NamedTuple):
    """Standard deviations over seeds: near, far of encodings that hold, far of those that break."""

    near: np.ndarray
    far: np.ndarray
    broken: np.ndarray


def published_spreads() -> Spreads:
    """Return the standard deviations over seeds of every encoding of BOARDS."""
    near, far, broken = [], [], []
    for board in BOARDS:
        rows = read_rows(ROOT / "results" / board)
        losses: dict[str, list[tuple[float, float | None]]] = {}
        for result in (row.result for row in rows if row.result.config.is_on_text):
            for row in rows_of(one_trial(result)):
                if row.reading == "trained":
                    bits = (row.near.bits_per_byte, far_loss(row, result))
                    losses.setdefault(row.encoding, []).append(bits)
        for of_encoding in losses.values():
            if len(of_encoding) == 1:  # one seed has no spread
                continue
            near_bits, far_of_seeds = zip(*of_encoding, strict=True)
            near.append(np.std(near_bits, ddof=1))
            if None not in far_of_seeds:
                breaks = np.mean(far_of_seeds) > np.mean(near_bits) + BREAKS
                (broken if breaks else far).append(np.std(far_of_seeds, ddof=1))
    return Spreads(*(np.array(each) for each in (near, far, broken)))


def one_trial(result: TrialResult) -> results.Study:
    """Return a study that has one trial only, with its result."""
    return results.Study(results.FORMAT, "", "", {}, {}, None, (result.config,), (result,))


def drawn(
    random: np.random.Generator, world: str, spread: np.ndarray, means: np.ndarray, seeds: int
) -> np.ndarray:
    """Return simulated losses (encodings, seeds) around these means, with the noise of a world.

    spread: standard deviation over seeds of each encoding.
    """
    count = len(means)
    noise = random.normal(size=(count, seeds))
    if world == "families":
        families = random.normal(size=(count // 3 + 1, seeds))[
            random.integers(count // 3 + 1, size=count)
        ]
        noise = SHARED**0.5 * families + (1 - SHARED) ** 0.5 * noise
    if world == "tenfold":
        spread = spread * np.where(np.arange(count) == 0, 10, 1)
    return means[:, None] + spread[:, None] * noise


class Study(NamedTuple):
    """True means (encodings) and losses (encodings, seeds) in both places, and which encodings have
    no failed trial."""

    means: tuple[np.ndarray, np.ndarray]
    losses: tuple[np.ndarray, np.ndarray]
    whole: np.ndarray


def draw_study(
    random: np.random.Generator,
    world: str,
    spreads: Spreads,
    near: np.ndarray,
    seeds: int,
    breaking: bool = False,
) -> Study:
    """Return a simulated study of a world.

    near: the true mean of each encoding, for both places.
    breaking: add at least BREAKS bits to the far mean of every third encoding but the best.
    """
    count = len(near)
    far = near.copy()
    far_spread = random.choice(spreads.far, count)
    if breaking:
        breaks = (np.arange(count) % 3 == 1) & (near > near.min())
        far = far + np.where(breaks, random.uniform(BREAKS, 3, count), 0)
        far_spread = np.where(breaks, random.choice(spreads.broken, count), far_spread)
    losses = (
        2 + drawn(random, world, random.choice(spreads.near, count), near, seeds),
        2 + drawn(random, world, far_spread, far, seeds),
    )
    fails = random.random((count, seeds)) < (FAILS if world == "failures" else 0)
    whole = ~fails.any(1)
    return Study((near, far), losses, whole if whole.any() else ~whole)


def judged(study: Study) -> Iterator[tuple[int, str | None, frozenset[tuple[str, str]]]]:
    """Yield for each place its number, 0 for near and 1 for far, the encoding that is named with
    "use" or "leads" (None if none is), and the pairs that differ."""
    names = [f"e{i}" for i in range(len(study.whole))]
    values = [
        {
            name: dict(enumerate(map(float, row)))
            for name, row, is_whole in zip(names, losses, study.whole, strict=True)
            if is_whole
        }
        for losses in study.losses
    ]
    places = places_of(*values)
    for i, standing in enumerate(places.all):
        choice = choose(standing, places, DriftOfLeads({}, places), None)
        is_named = choice.certainty != TIED and len(standing.order) > 1
        yield i, choice.taken if is_named else None, standing.worse_pairs


def is_wrong(study: Study) -> bool:
    """Return True if in some place an encoding is named that is worse than the best of those judged
    by more than MARGIN."""
    for i, named, _ in judged(study):
        means = np.where(study.whole, study.means[i], np.inf)
        if named is not None and means[int(named[1:])] > means.min() + MARGIN:
            return True
    return False


def cell(world: str, count: int, seeds: int, studies: int, spreads: Spreads) -> tuple:
    """Return a row of the table, in the order of HEADER.

    count: number of encodings. studies: number of simulated studies for each share.
    """
    random = np.random.default_rng([count, seeds, *world.encode()])

    def study(near: np.ndarray, breaking: bool = False) -> Study:
        return draw_study(random, world, spreads, near, seeds, breaking)

    best_last = np.where(np.arange(count) == count - 1, 0.0, 0.025)
    wrong = max(
        np.mean([is_wrong(study(best_last)) for _ in range(studies)]),
        np.mean([is_wrong(study(0.05 * random.normal(size=count))) for _ in range(studies)]),
    )
    named = np.zeros(2)
    for _ in range(studies):
        near = LEAD + 0.2 * random.random(count)
        near[1 if count > 2 else 0] = LEAD
        near[-1] = 0.0
        one = study(near, breaking=True)
        for i, name, _ in judged(one):
            has_no_lead = not one.whole[-1] or one.whole.sum() < 2
            named[i] += name == f"e{count - 1}" or has_no_lead
    differ = 0
    for _ in range(studies):
        equal = study(np.zeros(count))
        differ += any(pairs for _, _, pairs in judged(equal))
    shares = (wrong, *named / studies, differ / studies)
    return world, count, seeds, *(f"{share:.3f}" for share in shares)


def main() -> None:
    """Simulate every world and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=STUDIES)
    parser.add_argument("--table", type=Path, default=ROOT / "results/ablations/judged.csv")
    given = parser.parse_args()
    with refusing(parser):
        check_file("--table", given.table)
        spreads = published_spreads()
        rows = []
        for world, count, seeds in product(WORLDS, ENCODINGS, SEEDS):
            rows.append(cell(world, count, seeds, given.studies, spreads))
            print(*rows[-1], flush=True)
        write_table(given.table, HEADER, rows)


if __name__ == "__main__":
    main()
