"""What a model learns to say of a text: the next byte, hidden bytes, or what follows a source."""

from __future__ import annotations

from posenc.compare.objectives.causal import Causal
from posenc.compare.objectives.masked import Masked
from posenc.compare.objectives.objective import Objective
from posenc.compare.objectives.seq2seq import Seq2Seq
from posenc.compare.trial import TrialConfig

OBJECTIVES: dict[str, Objective] = {each.name: each for each in (Causal(), Masked(), Seq2Seq())}


def objective_of(config: TrialConfig) -> Objective:
    """What the trial's model learns to say."""
    return OBJECTIVES[config.objective]
