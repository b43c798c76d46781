"""Training objectives on text: the next byte, masked bytes, or a continuation."""

from posenc.command_line.options import check_choice
from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives.masked import MaskedObjective
from posenc.compare.trial.objectives.objective import CausalObjective, Objective
from posenc.compare.trial.objectives.seq2seq import Seq2SeqObjective

OBJECTIVES: dict[str, Objective] = {
    objective.name: objective
    for objective in (CausalObjective(), MaskedObjective(), Seq2SeqObjective())
}


def objective_of(config: TrialConfig) -> Objective:
    """Return the objective of a trial. Raises ValueError for an unknown one."""
    return OBJECTIVES[check_choice("A trial's objective", config.objective, OBJECTIVES)]
