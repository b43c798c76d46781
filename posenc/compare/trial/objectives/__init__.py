"""Training objectives on text: the next byte, masked bytes, or a continuation."""

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives.masked import Masked
from posenc.compare.trial.objectives.objective import Causal, Objective
from posenc.compare.trial.objectives.seq2seq import Seq2Seq

OBJECTIVES: dict[str, Objective] = {each.name: each for each in (Causal(), Masked(), Seq2Seq())}


def objective_of(config: TrialConfig) -> Objective:
    """Return the objective of a trial."""
    return OBJECTIVES[config.objective]
