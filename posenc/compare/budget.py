"""How much training a comparison gets, by name: every frozen number of it is here or, the steps and
lengths of a task, in `posenc.tasks`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from posenc.compare.options import Options


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


def chosen(options: Options) -> Budget:
    """The budget that --budget names, with --seeds and --steps in place of its own.

    Raises: ValueError for an unknown name.
    """
    known = SUITES if options.suite else BUDGETS
    named = known.get(options.budget)
    if named is None:
        raise ValueError(f"--budget must be {', '.join(known)}, got {options.budget!r}.")
    return named._replace(
        seeds=named.seeds if options.seeds is None else options.seeds,
        steps=named.steps if options.steps is None else options.steps,
    )


def with_suite(options: Options) -> Options:
    """With `--suite` the options that it stands for, but for those that the user gave.

    Raises: ValueError for an unknown budget, or for tasks beside the suite's own.
    """
    if not options.suite:
        return options
    budget = chosen(options)
    if options.task:
        raise ValueError(
            f"--task: --suite brings its own ({', '.join(budget.tasks)}). Leave one of both out."
        )
    sizes = {} if options.config is not None else SUITE_SIZES
    return replace(
        options,
        task=list(budget.tasks),
        check_lr=options.check_lr or budget.check_lr,
        **{name: size for name, size in sizes.items() if getattr(options, name) is None},
    )
