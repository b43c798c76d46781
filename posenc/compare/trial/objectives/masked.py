"""The masked objective: predict masked bytes of a window from both sides."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.forward import autocast, on_device
from posenc.compare.trial.objectives.objective import Asked, Objective
from posenc.compare.trial.windows import VOCABULARY
from posenc.encodings import PositionEncoding
from posenc.models import Decoder, DecoderConfig, Encoder
from posenc.models.stack import require_bidirectional

MASK = VOCABULARY
"""The symbol that replaces a masked byte."""
SHARE = 0.15
"""Fraction of masked bytes, as in BERT. All are replaced by the mask, because no fine-tuning
without masks follows."""
_HELD_OUT = 1 << 62
"""First half of the random key for held-out masks; training uses seeds, which are smaller."""


class MaskedModel(Decoder):
    """The decoder of the other objectives without its causal mask: every token sees all tokens.

    Raises: ValueError for an encoding that needs causal attention.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1, task 1.
    """

    default_mask = Encoder.default_mask

    def __init__(self, config: DecoderConfig, encoding: PositionEncoding) -> None:
        require_bidirectional("--objective masked", encoding)
        super().__init__(config, encoding)


def hidden_in_training(rows: Tensor, seed: int, step: int) -> Tensor:
    """Return True for masked bytes of a step's windows, drawn from the seed and the step."""
    # jumped, because the same key draws the start of windows.
    return _drawn(rows, np.random.Philox(key=[seed, step]).jumped())


def hidden_in_tests(rows: Tensor) -> Tensor:
    """Return True for masked bytes of held-out windows, the same for all seeds and encodings."""
    return _drawn(rows, np.random.Philox(key=np.array([_HELD_OUT, rows.shape[1]], np.uint64)))


class Masked(Objective):
    name = "masked"
    model = MaskedModel
    stacks = (False,)
    marks = 1
    said = f"{SHARE:.0%} of the bytes are hidden, and only those are scored."

    def ask(self, rows: Tensor, seed: int, step: int) -> Asked:
        rows = rows[:, :-1]
        return rows, hidden_in_training(rows, seed, step)

    def ask_held_out(self, rows: Tensor) -> Asked:
        rows = rows[:, :-1]
        return rows, hidden_in_tests(rows)

    def losses(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        rows, hidden = asked
        seen = on_device(rows.masked_fill(hidden, MASK), config)
        targets = on_device(rows[hidden], config)
        # Indices from the CPU: a mask on the device would be counted there, and waited for.
        row, column = (on_device(index, config) for index in hidden.nonzero(as_tuple=True))
        with autocast(config):
            logits = model(seen, length=rows.shape[1])
        return F.cross_entropy(logits[row, column].float(), targets, reduction="none")


def _drawn(rows: Tensor, bits: np.random.BitGenerator) -> Tensor:
    """Draw SHARE of the bytes, and at least one of each window."""
    random = np.random.Generator(bits)
    hidden = random.random(tuple(rows.shape)) < SHARE
    hidden[np.arange(len(hidden)), random.integers(hidden.shape[1], size=len(hidden))] = True
    return torch.from_numpy(hidden)
