"""How much training a comparison gets, by name."""

from __future__ import annotations

from typing import NamedTuple

from posenc.compare.options import Options


class Budget(NamedTuple):
    seeds: int
    steps: int


BUDGETS = {"quick": Budget(1, 300), "standard": Budget(2, 300), "thorough": Budget(3, 600)}
"""300 steps put in order, in each of three seeds, every pair of the six default encodings that 600
steps separate in all seeds; only losses at the trained length were looked at
(experiments/budget.py, results/compare/budget.csv)."""


def chosen(options: Options) -> Budget:
    """The budget that --budget names, with --seeds and --steps in place of its own.

    Raises: ValueError for an unknown name.
    """
    named = BUDGETS.get(options.budget)
    if named is None:
        raise ValueError(f"--budget must be {', '.join(BUDGETS)}, got {options.budget!r}.")
    return Budget(
        named.seeds if options.seeds is None else options.seeds,
        named.steps if options.steps is None else options.steps,
    )
