"""What a model learns to say of a text: the next byte, hidden bytes, or what follows a source."""

from __future__ import annotations

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.objectives.causal import Causal
from posenc.compare.trial.objectives.masked import Masked
from posenc.compare.trial.objectives.objective import Objective
from posenc.compare.trial.objectives.seq2seq import Seq2Seq

OBJECTIVES: dict[str, Objective] = {each.name: each for each in (Causal(), Masked(), Seq2Seq())}


def objective_of(config: TrialConfig) -> Objective:
    """What the trial's model learns to say."""
    return OBJECTIVES[config.objective]
