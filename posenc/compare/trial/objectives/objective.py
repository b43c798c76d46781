"""The base class of objectives: a model, its targets in windows of a text, and its test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.results import LengthScore, PositionScore
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.evaluate import BUCKETS, TOKENS_AT_ONCE, bits, cannot, length_score
from posenc.compare.trial.forward import on_device, token_losses
from posenc.compare.trial.windows import held_out_windows
from posenc.encodings import PositionEncoding
from posenc.models import Decoder

Asked = tuple[Tensor, ...]
"""Windows, which of their bytes are targets, and more: tensors with one row for each window."""
Scores = tuple[tuple[LengthScore, ...], tuple[PositionScore, ...], tuple[LengthScore, ...]]
"""Scores by length, by position in the longest window, and by context before the same targets."""


class Objective(ABC):
    """An objective of training on text.

    name: name on the command line.
    model: makes the model from its sizes and one encoding for each of its stacks.
    stacks: for each stack of layers with an encoding, True if it is causal; reports show the
        arguments of the last stack's encoding.
    marks: number of symbols in addition to those of the text.
    said: a sentence for the report on what is scored; "" for every byte.
    """

    name: ClassVar[str]
    model: ClassVar[Callable[..., nn.Module]]
    stacks: ClassVar[tuple[bool, ...]]
    marks: ClassVar[int] = 0
    said: ClassVar[str] = ""

    def ask(self, rows: Tensor, seed: int, step: int) -> Asked:
        """Return the windows and targets of a training step, from rows of length + 1 symbols."""
        return self.ask_held_out(rows)

    @abstractmethod
    def ask_held_out(self, rows: Tensor) -> Asked:
        """Return held-out windows and targets, the same for all seeds."""

    def count(self, asked: Asked) -> int:
        """Return the number of target bytes, which the second tensor marks."""
        return int(asked[1].sum())

    @abstractmethod
    def losses(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        """Return the cross-entropy in nats of each target byte, row by row."""

    @torch.no_grad()
    def test(self, model: nn.Module, symbols: np.ndarray, config: TrialConfig) -> Scores:
        """Return bits per target byte of held-out text by window length, by position inside the
        longest window, and by length of text up to the end of the same targets. A separator counts
        as a byte.

        Raises: FloatingPointError for a loss that is not finite.
        """
        model.eval()
        held_out = self.ask_held_out(held_out_windows(symbols, config))
        whole, wanted = held_out[:2]
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        targets = max(1, config.train_length // 2)
        by_length, by_position, by_context, at_the_end = [], (), [], {}
        for length in config.test_lengths:
            reason = cannot(encoding, self.longest_part(length))
            if reason:
                by_length.append(LengthScore(length, None, reason))
                continue
            parts = [
                (self._found(model, asked, config), asked[1])
                for asked in self.cut(held_out, length)
                if asked[1].any()
            ]
            scored = [(losses, asked.double()) for losses, asked in parts]
            by_length.append(length_score(length, scored, whole))
            by_position = _by_position(*parts[0])
            if wanted.all() and whole.shape[1] % length == 0:
                at_the_end[length] = parts[0][0][-len(whole) :, -targets:]
        alone = {targets} if len(self.stacks) == 1 else set()  # an encoder needs some input
        for length in sorted({*alone, *config.test_lengths}):
            reason = cannot(encoding, self.longest_part(length, targets))
            if reason:
                by_context.append(LengthScore(length, None, reason))
                continue
            # Ask for bytes among the targets only: masks before them would remove context.
            tokens, asked, *rest = (each[:, -length:].clone() for each in held_out)
            asked[:, :-targets] = False
            losses = at_the_end.get(length)  # read above, as windows at the end of the whole ones
            if losses is None:
                losses = self._found(model, (tokens, asked, *rest), config)
            by_context.append(LengthScore(length, bits((losses.sum() / asked.sum()).item())))
        return tuple(by_length), by_position, tuple(by_context)

    def _found(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        """Return (rows, length) nats in float64 on the CPU, 0 where there is no target."""
        length = asked[0].shape[1]
        found = torch.zeros(asked[0].shape, dtype=torch.float64)
        pieces = zip(*(t.split(max(1, TOKENS_AT_ONCE // length)) for t in asked), strict=True)
        parts = [self.losses(model, piece, config).double().cpu() for piece in pieces]
        found[asked[1]] = torch.cat(parts)
        if not found.isfinite().all():
            raise FloatingPointError(f"the loss is not finite at test length {length}")
        return found

    def longest_part(self, length: int, said: int | None = None) -> int:
        """Return the maximum number of positions in a stack for a window of this length whose last
        `said` bytes are targets."""
        return length

    def cut(self, whole: Asked, length: int) -> Iterator[Asked]:
        """Cut held-out windows into pieces of `length` with the same targets, each once; then yield
        the rest."""
        longest = whole[0].shape[1]
        stop = longest // length * length
        starts = range(0, stop, length)
        yield tuple(torch.cat([each[:, s : s + length] for s in starts]) for each in whole)
        if stop < longest:
            yield tuple(each[:, stop:] for each in whole)


class Causal(Objective):
    """Predict the next byte. The third tensor of what it asks has the byte after each one."""

    name = CAUSAL
    model = Decoder
    stacks = (True,)

    def ask_held_out(self, rows: Tensor) -> Asked:
        return rows[:, :-1], torch.ones_like(rows[:, :-1], dtype=torch.bool), rows[:, 1:]

    def losses(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        tokens, wanted, following = asked
        losses = token_losses(model, torch.cat([tokens, following[:, -1:]], dim=1), config)
        return losses.flatten() if wanted.all() else losses[on_device(wanted, config)]


def _by_position(losses: Tensor, asked: Tensor) -> tuple[PositionScore, ...]:
    width = max(1, -(-losses.shape[1] // BUCKETS))
    sums, counts = (t.double().sum(0).split(width) for t in (losses, asked))
    return tuple(
        PositionScore(i * width, i * width + len(one), bits((one.sum() / count.sum()).item()))
        for i, (one, count) in enumerate(zip(sums, counts, strict=True))
        if count.sum() > 0
    )
