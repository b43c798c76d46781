"""Say what to do after an encoding was inspected."""

import shlex
from collections.abc import Sequence

from posenc.report.report import Code, Section, section_of_next_steps

_BASELINES = ("rope", "alibi")


def section_on_training(names: Sequence[str]) -> Section:
    """Return the section with the command that trains the encodings `names` and compares them, with
    a baseline if there is only one."""
    compared = list(names)
    if len(compared) == 1:
        compared += [name for name in _BASELINES if name not in compared][:1]
    command = shlex.join(["posenc", "compare", *compared])
    return section_of_next_steps(["Train on short text, test on long text:", Code(command)])
