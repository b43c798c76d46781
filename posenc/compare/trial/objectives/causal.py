"""The causal objective: predict the next byte."""

import numpy as np
from torch import Tensor, nn

from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.evaluate import evaluate_lengths
from posenc.compare.trial.forward import token_losses
from posenc.compare.trial.objectives.objective import Asked, Objective, Scores
from posenc.models import Decoder


class Causal(Objective):
    name = CAUSAL
    model = Decoder
    stacks = (True,)

    def ask(self, rows: Tensor, seed: int, step: int) -> Asked:
        return (rows,)

    def ask_held_out(self, rows: Tensor) -> Asked:
        return (rows,)

    def count(self, asked: Asked) -> int:
        (rows,) = asked
        return rows.shape[0] * (rows.shape[1] - 1)

    def losses(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        (rows,) = asked
        return token_losses(model, rows, config)

    def test(self, model: nn.Module, symbols: np.ndarray, config: TrialConfig) -> Scores:
        return evaluate_lengths(model, symbols, config)
