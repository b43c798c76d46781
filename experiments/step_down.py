"""How often equal encodings are told to differ beside worse ones: the best are judged again.

python experiments/step_down.py

The studies of experiments/levels.py have only equal encodings; here some are worse, far away with
twenty times the spread, or in a staircase whose spread grows as its steps. Each row of
results/ablations/step_down.csv counts the studies in which any two of the equal ones are told to
differ: if all are judged once, and as `Standing` judges. Takes some minutes.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path

import levels
import numpy as np
from refused import check_file, refusing
from tables import write_table

from posenc.compare.judge.standing import Standing
from posenc.statistics.pairs import Pairs

ROOT = Path(__file__).parents[1]
HEADER = ("where", "world", "worse", "equal", "others", "seeds", "judged_once", "judged_again")
SIZES = ((2, 4), (3, 3), (6, 6), (7, 5))
"""Numbers of equal and of worse encodings."""
SEEDS = (2, 3, 5)


def far(random: np.random.Generator, others: int, seeds: int) -> np.ndarray:
    return 500 + 20 * random.normal(size=(others, seeds))


def staircase(random: np.random.Generator, others: int, seeds: int) -> np.ndarray:
    steps = 3.0 * 2 ** np.arange(others)[:, None]
    return steps + steps / 6 * random.normal(size=(others, seeds))


def told(equal: np.ndarray, worse: np.ndarray, where: str) -> tuple[bool, ...]:
    """Whether any of the equal ones are told to differ: judged once, and again."""
    values = {str(i): dict(enumerate(each)) for i, each in enumerate([*equal.tolist(), *worse])}
    standing = Standing("", Pairs(values, where))
    known = {str(i) for i in range(len(equal))}
    return tuple(
        any({*pair} <= known for pair in w) for w in (standing.pairs.worse, standing.worse)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=500)
    parser.add_argument("--table", type=Path, default=ROOT / "results/ablations/step_down.csv")
    given = parser.parse_args()
    with refusing(parser):
        check_file("--table", given.table)
        rows = []
        for where in ("at", "beyond"):
            for (world, draw), others in product(levels.worlds()[where].items(), (far, staircase)):
                for (k, more), n in ((size, n) for size in SIZES for n in SEEDS):
                    random = np.random.default_rng([k, more, n, *f"{where}{world}".encode()])
                    drawn = draw(random, (given.studies, k, n))
                    unit = np.std(drawn - drawn.mean(2, keepdims=True))
                    found = [
                        told(each / unit, others(random, more, n).tolist(), where) for each in drawn
                    ]
                    shares = (f"{share:.3f}" for share in np.mean(found, axis=0))
                    rows.append((where, world, others.__name__, k, more, n, *shares))
                    print(*rows[-1], flush=True)
        write_table(given.table, HEADER, rows)


if __name__ == "__main__":
    main()
