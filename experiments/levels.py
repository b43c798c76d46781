"""Set the levels of posenc/statistics/levels.csv by simulated studies whose encodings are equal.

python experiments/levels.py

Each cell of the table is a number of encodings and of seeds, and what is compared: scores of a
task, or mean ranks over three tasks (for losses on text see experiments/judged.py). Its level is
the highest of LADDER with which at most 6 % of the studies of every world find any difference; the
last column is the most that the worlds show in other studies, drawn afterwards. Where even the
lowest level is not enough, or no two scores can differ significantly with it, there is none, and so
few seeds say nothing. Takes some minutes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from refused import check_file, refusing
from scipy import stats
from tables import write_table

from posenc.compare.trial.evaluate import NUM_TEST_SEQUENCES
from posenc.statistics.seed_intervals import studentized_range_quantile

ROOT = Path(__file__).parents[1]
HEADER = ("where", "encodings", "seeds", "level", "false_alarms", "world")
ENCODINGS, SEEDS = (*range(2, 17), 24, 48), range(2, 9)
LADDER = (
    0.05,
    0.04,
    0.03,
    0.025,
    0.02,
    0.0175,
    0.015,
    0.0125,
    0.01,
    0.0075,
    0.005,
    0.0035,
    0.0025,
    0.0015,
    0.001,
    0.0005,
    0.00025,
)
ASKED, MOST = 0.06, 0.065
"""Share of studies with a false alarm that a level is chosen for; the most that is taken where no
level reaches it, which is 1 / 16 of five seeds that are all of one kind by chance."""
TASKS, RESOLUTION = 3, 1 / NUM_TEST_SEQUENCES
STUDIES = 20_000
Shape = tuple[int, int, int]
World = Callable[[np.random.Generator, Shape], np.ndarray]
"""Draws (studies, encodings, seeds) of values whose means are equal."""


def equal(random: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return normal values: all encodings have the same mean and variance."""
    return random.normal(size=shape)


def tenfold(share: float, times: float = 10) -> World:
    """Return a world in which a share of the encodings, one at least, has `times` the variance of
    the others."""

    def draw(random: np.random.Generator, shape: Shape) -> np.ndarray:
        values = random.normal(size=shape)
        values[:, : max(1, int(share * shape[1]))] *= times**0.5
        return values

    return draw


def two_kinds(random: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return values of a world in which every trial succeeds or fails, at even odds."""
    return _kinds(random, shape) + random.uniform(-0.03, 0.03, shape)


def one_alone(random: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return values of a world in which the trials of one encoding succeed or fail; all others vary
    around its mean by as little as the score of so few sequences can show."""
    values = random.uniform(-RESOLUTION, RESOLUTION, shape)
    values[:, 0] += _kinds(random, shape)[:, 0]
    return values


def _kinds(random: np.random.Generator, shape: Shape) -> np.ndarray:
    """Return -0.47 or 0.47 for every trial, at even odds. The first encoding goes through all its
    patterns equally often, so that chance moves no share of them."""
    studies, _, seeds = shape
    kinds = random.random(shape) < 0.5
    patterns = random.permutation(studies) % 2**seeds
    kinds[:, 0] = patterns[:, None] >> np.arange(seeds) & 1
    return np.where(kinds, 0.47, -0.47)


def ranked(world: World) -> World:
    """Return the world of mean ranks over TASKS tasks whose scores are those of a world."""

    def draw(random: np.random.Generator, shape: Shape) -> np.ndarray:
        ranks = [world(random, shape).argsort(axis=1).argsort(axis=1) for _ in range(TASKS)]
        return np.mean(ranks, axis=0)

    return draw


def worlds() -> dict[str, dict[str, World]]:
    """Return the worlds by name, for "task" (scores of one task) and "tasks" (mean ranks)."""
    equal_means: dict[str, World] = {"equal": equal}
    wide = {"one tenfold": tenfold(0), "half tenfold": tenfold(0.5)}
    kinds = {"two kinds": two_kinds, "one alone": one_alone}
    ranks = {f"ranks, {name}": ranked(each) for name, each in (equal_means | kinds).items()}
    return {"task": wide | kinds, "tasks": ranks}


def largest(values: np.ndarray) -> np.ndarray:
    """Return for each study the largest difference of a pair, in the standard errors that judge it.

    values: (studies, encodings, seeds).
    """
    _, k, n = values.shape
    left = values - values.mean(2, keepdims=True) - values.mean(1, keepdims=True)
    left += values.mean((1, 2), keepdims=True)
    pooled = np.maximum((left**2).sum((1, 2)) / ((k - 1) * (n - 1)), 1e-24)
    found = np.zeros(len(values))
    for a in range(k):
        gaps = values[:, a + 1 :] - values[:, a : a + 1]
        own = gaps.var(2, ddof=1) / 2
        apart = np.abs(gaps.mean(2)) / np.sqrt(np.maximum(pooled[:, None], own) / n)
        found = np.maximum(found, apart.max(1, initial=0))
    return found


def cell(where: str, drawn: dict[str, World], k: int, n: int, studies: int) -> tuple:
    """Return a row of the table, in the order of HEADER, for k encodings with n seeds.

    drawn: the worlds by name. studies: number of simulated studies of each.
    """
    random, freedom = np.random.default_rng([k, n, *where.encode()]), (k - 1) * (n - 1)

    def found() -> list[np.ndarray]:
        return [largest(world(random, (studies, k, n))) for world in drawn.values()]

    first = found()
    for share in (ASKED, MOST):
        needed = max(np.quantile(each, 1 - share) for each in first)
        exact = stats.studentized_range.sf(needed, k, freedom)
        level = next((level for level in LADDER if level <= exact), None)
        if level is not None:
            critical = studentized_range_quantile(level, k, freedom)
            if where == "task" and critical * RESOLUTION > n**0.5:
                break  # the least difference would exceed 1, and scores lie between 0 and 1
            shares = [float((each > critical).mean()) for each in found()]
            worst = max(shares)
            return where, k, n, level, f"{worst:.4f}", list(drawn)[shares.index(worst)]
    return where, k, n, "", "", ""


def main() -> None:
    """Simulate every cell and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=STUDIES)
    parser.add_argument("--table", type=Path, default=ROOT / "posenc/statistics/levels.csv")
    given = parser.parse_args()
    with refusing(parser):
        check_file("--table", given.table)
        rows = []
        for where, drawn in worlds().items():
            for k in ENCODINGS:
                rows += [cell(where, drawn, k, n, given.studies) for n in SEEDS]
                print(where, k, *(row[3] or "none" for row in rows[-len(SEEDS) :]), flush=True)
        write_table(given.table, HEADER, rows)


if __name__ == "__main__":
    main()
