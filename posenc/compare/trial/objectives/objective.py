"""The base class of objectives: a model, its targets in windows of a text, and its test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.scores import LengthScore, PositionScore
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.evaluate import (
    MAX_POSITION_RUNS,
    TOKENS_AT_ONCE,
    nats_to_bits,
    score_length,
    why_length_impossible,
)
from posenc.compare.trial.forward import on_device, token_losses
from posenc.compare.trial.windows import held_out_windows
from posenc.encodings import PositionEncoding
from posenc.models import Decoder

MarkedWindows = tuple[Tensor, ...]
"""Windows, True for those of their bytes that are targets, and what else an objective needs:
tensors with one row for each window."""
Scores = tuple[tuple[LengthScore, ...], tuple[PositionScore, ...], tuple[LengthScore, ...]]
"""Scores by length, by position in the longest window, and by context before the same targets."""


class _LengthTests(NamedTuple):
    """The tests at every length: scores by length, and by position at the longest that runs.

    at_the_end: by length, the losses of the last targets of each window, (windows, targets), where
        the pieces end with the window, so that they need not be computed again.
    """

    scores: list[LengthScore]
    by_position: tuple[PositionScore, ...]
    at_the_end: dict[int, Tensor]


class Objective(ABC):
    """An objective of training on text.

    name: name on the command line.
    model: makes the model from its sizes and one encoding for each of its stacks.
    stacks: for each stack of layers with an encoding, True if it is causal; reports show the
        arguments of the last stack's encoding.
    extra_symbols: number of symbols in addition to those of the text.
    scoring_note: a sentence for the report on what is scored; "" for every byte.
    """

    name: ClassVar[str]
    model: ClassVar[Callable[..., nn.Module]]
    stacks: ClassVar[tuple[bool, ...]]
    extra_symbols: ClassVar[int] = 0
    scoring_note: ClassVar[str] = ""

    def training_targets(self, rows: Tensor, seed: int, step: int) -> MarkedWindows:
        """Return the windows of a training step with their targets marked, from rows of length + 1
        symbols."""
        return self.held_out_targets(rows)

    @abstractmethod
    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        """Return held-out windows with their targets marked, the same for all seeds, from rows of
        length + 1 symbols."""

    def count_targets(self, windows: MarkedWindows) -> int:
        """Return the number of target bytes, which the second tensor marks."""
        return int(windows[1].sum())

    @abstractmethod
    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        """Return the cross-entropy in nats of each target byte, (targets,), row by row."""

    @torch.no_grad()
    def test(self, model: nn.Module, symbols: np.ndarray, config: TrialConfig) -> Scores:
        """Return bits per target byte of held-out text by window length, by position inside the
        longest window, and by length of text up to the end of the same targets. A separator counts
        as a byte.

        Raises: FloatingPointError for a loss that is not finite.
        """
        model.eval()
        held_out = self.held_out_targets(held_out_windows(symbols, config))
        by_length = self._test_lengths(model, held_out, config)
        by_context = self._test_contexts(model, held_out, config, by_length.at_the_end)
        return tuple(by_length.scores), by_length.by_position, tuple(by_context)

    def _test_lengths(
        self, model: nn.Module, held_out: MarkedWindows, config: TrialConfig
    ) -> _LengthTests:
        """Return the scores of held-out windows that are cut into pieces of each test length."""
        windows = held_out[0]
        is_target = held_out[1]
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        scores: list[LengthScore] = []
        by_position: tuple[PositionScore, ...] = ()
        at_the_end: dict[int, Tensor] = {}
        for length in config.test_lengths:
            reason = why_length_impossible(encoding, self.longest_stack_input(length))
            if reason:
                scores.append(LengthScore(length, None, reason))
                continue
            pieces = [piece for piece in self.cut_pieces(held_out, length) if piece[1].any()]
            losses = [self._losses_by_byte(model, piece, config) for piece in pieces]
            targets = [piece[1] for piece in pieces]
            counts = [of_piece.double() for of_piece in targets]
            scored = list(zip(losses, counts, strict=True))
            scores.append(score_length(length, scored, windows))
            by_position = _score_positions(losses[0], targets[0])
            ends_with_a_piece = windows.shape[1] % length == 0
            if is_target.all() and ends_with_a_piece:
                last = losses[0][-len(windows) :]
                at_the_end[length] = last[:, -_num_context_targets(config) :]
        return _LengthTests(scores, by_position, at_the_end)

    def _test_contexts(
        self,
        model: nn.Module,
        held_out: MarkedWindows,
        config: TrialConfig,
        at_the_end: dict[int, Tensor],
    ) -> list[LengthScore]:
        """Return the scores of the last bytes of each window, the same ones for every length, read
        after a context of each length.

        at_the_end: losses of these bytes that the tests of lengths have computed already, by
            length; see `_LengthTests`.
        """
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        targets = _num_context_targets(config)
        lengths = set(config.test_lengths)
        if len(self.stacks) == 1:  # an encoder needs some input
            lengths.add(targets)
        by_context = []
        for length in sorted(lengths):
            reason = why_length_impossible(encoding, self.longest_stack_input(length, targets))
            if reason:
                by_context.append(LengthScore(length, None, reason))
                continue
            # Mark bytes among the last targets only: masks before them would remove context.
            tokens, is_target, *rest = (tensor[:, -length:].clone() for tensor in held_out)
            is_target[:, :-targets] = False
            losses = at_the_end.get(length)
            if losses is None:
                losses = self._losses_by_byte(model, (tokens, is_target, *rest), config)
            by_context.append(
                LengthScore(length, nats_to_bits((losses.sum() / is_target.sum()).item()))
            )
        return by_context

    def _losses_by_byte(
        self, model: nn.Module, windows: MarkedWindows, config: TrialConfig
    ) -> Tensor:
        """Return the loss of each byte of the windows, (rows, length) in nats, in float64 on the
        CPU; 0 for a byte that is no target. It reads a few rows at a time.

        Raises: FloatingPointError for a loss that is not finite.
        """
        tokens = windows[0]
        is_target = windows[1]
        length = tokens.shape[1]
        rows_at_once = max(1, TOKENS_AT_ONCE // length)
        pieces = zip(*(tensor.split(rows_at_once) for tensor in windows), strict=True)
        parts = [self.losses(model, piece, config).double().cpu() for piece in pieces]
        losses = torch.zeros(tokens.shape, dtype=torch.float64)
        losses[is_target] = torch.cat(parts)
        if not losses.isfinite().all():
            raise FloatingPointError(f"the loss is not finite at test length {length}")
        return losses

    def longest_stack_input(self, length: int, targets: int | None = None) -> int:
        """Return the maximum number of positions in a stack for a window of this length whose last
        `targets` bytes are targets."""
        return length

    def cut_pieces(self, whole: MarkedWindows, length: int) -> Iterator[MarkedWindows]:
        """Cut held-out windows into pieces of `length` with the same targets, each once; then yield
        the rest."""
        longest = whole[0].shape[1]
        stop = longest // length * length
        starts = range(0, stop, length)
        yield tuple(torch.cat([tensor[:, s : s + length] for s in starts]) for tensor in whole)
        if stop < longest:
            yield tuple(tensor[:, stop:] for tensor in whole)


class CausalObjective(Objective):
    """Predict the next byte. All bytes are targets; the third tensor of its windows has the byte
    after each one."""

    name = CAUSAL
    model = Decoder
    stacks = (True,)

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        return rows[:, :-1], torch.ones_like(rows[:, :-1], dtype=torch.bool), rows[:, 1:]

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        tokens, is_target, following = windows
        losses = token_losses(model, torch.cat([tokens, following[:, -1:]], dim=1), config)
        return losses.flatten() if is_target.all() else losses[on_device(is_target, config)]


def _num_context_targets(config: TrialConfig) -> int:
    """Return how many bytes at the end of a window are targets after every context."""
    return max(1, config.train_length // 2)


def _score_positions(losses: Tensor, is_target: Tensor) -> tuple[PositionScore, ...]:
    """Return the mean loss in bits of up to MAX_POSITION_RUNS runs of equally many positions.

    losses, is_target: both (rows, length); losses in nats, 0 for a byte that is no target.
    """
    width = max(1, -(-losses.shape[1] // MAX_POSITION_RUNS))
    sums = losses.double().sum(0).split(width)
    counts = is_target.double().sum(0).split(width)
    scores = []
    for i, (loss, count) in enumerate(zip(sums, counts, strict=True)):
        if count.sum() > 0:
            first = i * width
            mean = nats_to_bits((loss.sum() / count.sum()).item())
            scores.append(PositionScore(first, first + len(loss), mean))
    return tuple(scores)
