"""The sequence-to-sequence objective: an encoder reads the first half of a window, a decoder
predicts the second."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from posenc.compare.trial.config import TrialConfig
from posenc.compare.trial.forward import autocast, on_device
from posenc.compare.trial.objectives.objective import MarkedWindows, Objective
from posenc.compare.trial.windows import VOCABULARY
from posenc.encodings import PositionEncoding
from posenc.models import EncoderDecoder

BEGIN_SYMBOL = VOCABULARY
"""The symbol that the decoder reads before its first byte."""


class ContinuationModel(EncoderDecoder):
    """Predict the continuation of a source. Each stack has its own encoding, built from the same
    text; cross-attention has none, as in the original Transformer and in T5."""

    def forward(  # type: ignore[override]
        self, source: Int[Tensor, "batch source_len"], tokens: Int[Tensor, "batch len"]
    ) -> Float[Tensor, "batch len vocab_size"]:
        """Return the logits of the next token after each token."""
        return self.conditioned_on(source, length=source.shape[1])(tokens, length=tokens.shape[1])

    @property
    def encoding(self) -> PositionEncoding:
        """Return the encoding of the decoder; that of the encoder has the same limits."""
        return self.decoder.encoding


class Seq2SeqObjective(Objective):
    """Predict each byte of the second half of a window from the first half and the bytes before it.

    Source: prefix language modelling in Raffel et al. 2020, arXiv:1910.10683, section 3.3.1.
    """

    name = "seq2seq"
    model = ContinuationModel
    stacks = (False, True)
    extra_symbols = 1
    scoring_note = (
        "An encoder reads the first half of each window and a decoder predicts the second; only "
        "the second is scored."
    )

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        return _mark_targets_from(rows[:, :-1], self.longest_stack_input(rows.shape[1] - 1))

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        rows = on_device(windows[0], config)
        begin = int(windows[1][0].int().argmax())  # the first target, the same in all rows
        source = rows[:, :begin]
        targets = rows[:, begin:]
        inputs = F.pad(targets[:, :-1], (1, 0), value=BEGIN_SYMBOL)
        with autocast(config):
            logits = model(source, inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")

    def longest_stack_input(self, length: int, targets: int | None = None) -> int:
        if targets is None:
            targets = length // 2
        return max(targets, length - targets)

    def num_far_targets(self, config: TrialConfig) -> int:
        return max(1, config.train_length // 2)


def _mark_targets_from(rows: Tensor, begin: int) -> MarkedWindows:
    """Return the windows, and a tensor that marks their bytes from `begin` on as targets."""
    is_target = torch.zeros_like(rows, dtype=torch.bool)
    is_target[:, begin:] = True
    return rows, is_target
