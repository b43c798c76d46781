"""The masked objective: predict masked bytes of a window from both sides."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.forward import autocast, on_device
from posenc.compare.trial.objectives.objective import MarkedWindows, Objective
from posenc.compare.trial.windows import VOCABULARY
from posenc.encodings import PositionEncoding
from posenc.models import Decoder, DecoderConfig, Encoder
from posenc.models.stack import require_bidirectional

MASK_SYMBOL = VOCABULARY
"""The symbol that replaces a masked byte."""
MASKED_FRACTION = 0.15
"""Fraction of masked bytes, as in BERT. All are replaced by the mask, because no fine-tuning
without masks follows."""
_HELD_OUT_KEY = 1 << 62
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


def draw_training_mask(rows: Tensor, seed: int, step: int) -> Tensor:
    """Return True for the bytes of a training step's windows that are masked, (windows, length).
    They depend only on the seed and the step."""
    # jumped, because the same key draws the start of windows.
    return _draw_mask(rows, np.random.Philox(key=[seed, step]).jumped())


def draw_test_mask(rows: Tensor) -> Tensor:
    """Return True for the bytes of held-out windows that are masked, (windows, length), the same
    for all seeds and encodings."""
    return _draw_mask(
        rows, np.random.Philox(key=np.array([_HELD_OUT_KEY, rows.shape[1]], np.uint64))
    )


class MaskedObjective(Objective):
    """Predict masked bytes.

    Its windows are (rows, is_masked), both (windows, length): is_masked is True for the bytes to
    predict. The model sees MASK_SYMBOL in their place.
    """

    name = "masked"
    model = MaskedModel
    stacks = (False,)
    extra_symbols = 1
    scoring_note = f"{MASKED_FRACTION:.0%} of the bytes are hidden, and only those are scored."

    def training_targets(self, rows: Tensor, seed: int, step: int) -> MarkedWindows:
        """Return the windows of a training step with the mask of its bytes, which `seed` and `step`
        decide. The last symbol of each row is dropped: only the next-byte objective needs it."""
        rows = rows[:, :-1]
        return rows, draw_training_mask(rows, seed, step)

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        rows = rows[:, :-1]
        return rows, draw_test_mask(rows)

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        rows, is_masked = windows
        visible = on_device(rows.masked_fill(is_masked, MASK_SYMBOL), config)
        targets = on_device(rows[is_masked], config)
        # Indices from the CPU: a mask on the device would be counted there, and waited for.
        row, column = (on_device(index, config) for index in is_masked.nonzero(as_tuple=True))
        with autocast(config):
            logits = model(visible, length=rows.shape[1])
        return F.cross_entropy(logits[row, column].float(), targets, reduction="none")


def _draw_mask(rows: Tensor, bits: np.random.BitGenerator) -> Tensor:
    """Return a mask of the shape of `rows`, drawn from the generator `bits`: True for
    MASKED_FRACTION of the bytes, and for at least one of each window, so that every window has a
    loss."""
    random = np.random.Generator(bits)
    is_masked = random.random(tuple(rows.shape)) < MASKED_FRACTION
    at_least_one = random.integers(is_masked.shape[1], size=len(is_masked))
    is_masked[np.arange(len(is_masked)), at_least_one] = True
    return torch.from_numpy(is_masked)
