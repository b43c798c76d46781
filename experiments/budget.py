"""How many steps, and which learning rate, does the default comparison need?

python experiments/budget.py FOLDER...

Each folder is what `posenc compare --seeds 3 --steps N --lr X --test-lengths 128` wrote. Nothing
beyond the trained length is looked at. Two encodings are separated at a number of steps where the
same one is better in every seed. A budget is sound where each pair that is separated at twice its
steps (at the default learning rate) stands in the same order in every seed. Prints the table, and
writes it to results/compare/budget.csv with each seed's bits per byte.
"""

from __future__ import annotations

import argparse
import csv
from itertools import combinations
from pathlib import Path

from refused import check_file, refusing
from tables import write_table

ROOT = Path(__file__).parents[1]

DEFAULT_LR = 0.002
Budget = tuple[int, float, int]
"""steps, learning rate, recipe: one is compared with another of the same recipe only."""
COLUMNS = (
    "steps",
    "lr",
    "recipe",
    "encoding",
    "seed",
    "bits_per_byte",
    "pairs_at_twice",
    "pairs_lost",
)
Losses = dict[str, list[float]]
"""Bits per byte at the trained length of each encoding, by seed."""


def read(folder: Path) -> tuple[Budget, Losses]:
    """Return the budget of the trials in a folder of `posenc compare`, and the losses of each
    encoding at the trained length, by seed. Raises: ValueError unless all trials have one budget
    and all encodings the same seeds."""
    by_seed: dict[str, dict[int, float]] = {}
    budgets = set()
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["measure"] == "by_length" and row["at"] == row["train_length"]:
                budgets.add((int(row["steps"]), float(row["lr"]), int(row["recipe"])))
                by_seed.setdefault(row["encoding"], {})[int(row["seed"])] = float(
                    row["bits_per_byte"]
                )
    if len(budgets) != 1:
        said = "; ".join(f"{n} steps, lr {lr}, recipe {r}" for n, lr, r in sorted(budgets))
        raise ValueError(f"{folder}: expected trials of one budget, got {said or 'no score'}.")
    (budget,) = budgets
    seeds = {tuple(sorted(each)) for each in by_seed.values()}
    if len(seeds) != 1:
        raise ValueError(f"{folder}: the encodings have other seeds: {sorted(seeds)}")
    return budget, {name: [each[s] for s in sorted(each)] for name, each in by_seed.items()}


def order(losses: Losses, a: str, b: str) -> int:
    """Return -1 where a is better than b in every seed, 1 where b is, 0 where seeds disagree."""
    signs = {(x > y) - (x < y) for x, y in zip(losses[a], losses[b], strict=True)}
    return signs.pop() if len(signs) == 1 else 0


def kept(losses: Losses, twice: Losses) -> tuple[int, list[str]]:
    """Return how many pairs are separated at twice the steps (the losses `twice`), and the names of
    those pairs that do not stand in the same order in `losses`."""
    pairs = [(a, b) for a, b in combinations(twice, 2) if order(twice, a, b)]
    lost = [f"{a}/{b}" for a, b in pairs if order(losses, a, b) != order(twice, a, b)]
    return len(pairs), lost


def judge(found: dict[Budget, Losses], table: Path) -> None:
    """Print what each budget keeps, and write every seed's loss."""
    rows = []
    for (steps, lr, recipe), losses in sorted(found.items()):
        twice = found.get((2 * steps, DEFAULT_LR, recipe))
        pairs, lost = kept(losses, twice) if twice else (None, [])
        means = {name: sum(each) / len(each) for name, each in losses.items()}
        print(f"{steps} steps, lr {lr}:", ", ".join(f"{n} {m:.3f}" for n, m in means.items()))
        verdict = "not judged: twice its steps were not run"
        if twice:
            verdict = f"{pairs - len(lost)} of {pairs} pairs kept {' '.join(lost)}"
        print("   ", verdict)
        for name, each in losses.items():
            lost_here = None if pairs is None else len(lost)
            rows += [
                (steps, lr, recipe, name, seed, f"{x:.4f}", pairs, lost_here)
                for seed, x in enumerate(each)
            ]
    write_table(table, COLUMNS, rows)


def main() -> None:
    """Read the folders of the command line, print the table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, default=ROOT / "results/compare/budget.csv")
    given = parser.parse_args()
    with refusing(parser):
        check_file("--table", given.table)
        judge(dict(read(folder) for folder in given.folders), given.table)


if __name__ == "__main__":
    main()
