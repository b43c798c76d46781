"""How much training a comparison gets, by name: every frozen number of it is here or, the steps and
lengths of a task, in `posenc.tasks`."""

from __future__ import annotations

from typing import Any, NamedTuple


class Budget(NamedTuple):
    """How many seeds, and how many steps on text; of a suite also which tasks, and whether learning
    rates are checked."""

    seeds: int
    steps: int
    tasks: tuple[str, ...] = ()
    check_lr: bool = False

    def __str__(self) -> str:
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}, {self.steps} steps"
        tasks = f" on text, {', '.join(self.tasks[1:])}" if self.tasks else ""
        return f"{seeds}{tasks}{', --check-lr' if self.check_lr else ''}"


BUDGETS = {"quick": Budget(1, 200), "standard": Budget(2, 200), "thorough": Budget(3, 600)}
"""200 steps, the fewest that were tried, put in order, in each of three seeds, every pair of the
six default encodings that 400 steps separate in all seeds, and so do 250 and 300 with twice as
many; only losses at the trained length were looked at (experiments/budget.py,
results/compare/budget.csv)."""

_FOUR = ("text", "copy", "recall", "offset")
ALL_TASKS = (*_FOUR, "flip_flop", "reverse", "copy_512")
"""Text and the tasks of sequences, the quick ones first."""
SUITES = {
    "quick": Budget(1, 600, _FOUR),
    "standard": Budget(2, 600, ALL_TASKS),
    "thorough": Budget(3, 600, ALL_TASKS, check_lr=True),
}
"""Each has all trials of the one before, so that a larger budget goes on with its results; but
checked learning rates are other trials."""
SUITE_SIZES: dict[str, Any] = {"width": 64, "layers": 3, "heads": 4}
"""Of the suite's decoder: about a third of the time of the usual one, and enough to learn the
tasks."""
