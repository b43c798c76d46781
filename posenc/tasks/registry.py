"""Find tasks by name."""

import difflib

from posenc.tasks.copy import Copy, CopyDistinct, Reverse
from posenc.tasks.flip_flop import FlipFlop
from posenc.tasks.grids import Grid, GridCount, GridDirection
from posenc.tasks.needles import CommonWords, NeedleByMeaning, Variables
from posenc.tasks.offsets import Offset
from posenc.tasks.recall import Recall
from posenc.tasks.task import Task

TEXT = "text"
"""Name of the task that is not generated: predict the next byte of a text."""
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(Copy(), CopyDistinct(), Reverse(), Recall(), FlipFlop(), Offset()),
        *(Grid(), GridDirection(), GridCount()),
        *(NeedleByMeaning(), Variables(), CommonWords()),
    )
}
"""Every generated task by its name, retired ones too."""


def find_task(name: str, accept_retired: bool = False) -> Task:
    """Return the task of this name.

    accept_retired: return a retired task too, for results that were made with it.

    Raises: ValueError if no task has this name, with the nearest one; or for a retired task.

    >>> find_task("copy").test_lengths
    (20, 24, 30, 40, 80)
    """
    if name in TASKS:
        task = TASKS[name]
        if task.why_retired and not accept_retired:
            raise ValueError(f"The task {name!r} is retired: {task.why_retired}.")
        return task
    known_names = (TEXT, *(name for name, task in TASKS.items() if not task.why_retired))
    # Below difflib's 0.6, as there are few names; chosen, not derived.
    close_names = difflib.get_close_matches(name, known_names, n=1, cutoff=0.4)
    suggestion = f" Did you mean {close_names[0]!r}?" if close_names else ""
    raise ValueError(
        f"Unknown task {name!r}.{suggestion or ' Known: ' + ', '.join(known_names) + '.'}"
    )
