"""The base class of objectives: a model, its targets in windows of a text, and its test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.scores import FarScore, LengthScore, PositionScore
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.evaluate import (
    MAX_POSITION_RUNS,
    TOKENS_AT_ONCE,
    bits_by_window,
    nats_to_bits,
    score_length,
    why_length_impossible,
)
from posenc.compare.trial.forward import on_device, token_losses
from posenc.compare.trial.windows import held_out_windows, window_ends
from posenc.encodings import PositionEncoding
from posenc.models import Decoder

MarkedWindows = tuple[Tensor, ...]
"""Windows, True for those of their bytes that are targets, and what else an objective needs:
tensors with one row for each window."""
NearLosses = dict[tuple[Any, ...], Tensor]
"""Losses of far targets with near context only, (windows, targets), by the windows that were read:
several lengths, and readings that see all near tokens, share them."""


class Scores(NamedTuple):
    """The tests of a model on text, as fields of a TrialResult."""

    by_length: tuple[LengthScore, ...]
    by_position: tuple[PositionScore, ...]
    far: tuple[FarScore, ...]


class Objective(ABC):
    """An objective of training on text.

    name: name on the command line.
    model: makes the model from its sizes and one encoding for each of its stacks.
    stacks: for each stack of layers with an encoding, True if it is causal; reports show the
        arguments of the last stack's encoding.
    extra_symbols: number of symbols in addition to those of the text.
    scoring_note: a sentence for the report on what is scored; "" for every byte.
    near_pieces: number of pieces in which far targets are read with near context only; each target
        has at most train_length tokens of context, and at least as many less one piece.
    """

    name: ClassVar[str]
    model: ClassVar[Callable[..., nn.Module]]
    stacks: ClassVar[tuple[bool, ...]]
    extra_symbols: ClassVar[int] = 0
    scoring_note: ClassVar[str] = ""
    near_pieces: ClassVar[int] = 1

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
    def test(
        self,
        model: nn.Module,
        symbols: np.ndarray,
        config: TrialConfig,
        lengths: Sequence[int] | None = None,
        near_losses: NearLosses | None = None,
    ) -> Scores:
        """Return bits per target byte of held-out text by window length, by position inside the
        longest window that runs, and of the far targets of each window longer than in training. A
        separator counts as a byte.

        The score at a length depends on the text and that length only, not on the other lengths.

        lengths: those that are tested, by default all of the trial.
        near_losses: what an earlier test has read with near context; this test adds to it.
        Raises: FloatingPointError for a loss that is not finite.
        """
        model.eval()
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        near_losses = {} if near_losses is None else near_losses
        by_length: list[LengthScore] = []
        by_position: tuple[PositionScore, ...] = ()
        far: list[FarScore] = []
        for length in config.test_lengths if lengths is None else lengths:
            ends = window_ends(len(symbols), length, config)
            windows = self.held_out_targets(held_out_windows(symbols, length, config))
            losses = None
            reason = why_length_impossible(encoding, self.longest_stack_input(length))
            if reason:
                by_length.append(LengthScore(length, None, reason))
            else:
                losses = self._losses_by_byte(model, windows, config)
                by_length.append(score_length(length, losses, windows[1]))
                by_position = _score_positions(losses, windows[1])
            if length > config.train_length:
                key = tuple(ends.tolist())
                far.append(self._score_far(model, windows, config, losses, near_losses, key))
        return Scores(tuple(by_length), by_position, tuple(far))

    def num_far_targets(self, config: TrialConfig) -> int:
        """Return how many bytes at the end of a long window are far targets: those of a window of
        the training length."""
        return config.train_length

    def _score_far(
        self,
        model: nn.Module,
        windows: MarkedWindows,
        config: TrialConfig,
        losses: Tensor | None,
        near_losses: NearLosses,
        ends: tuple[int, ...],
    ) -> FarScore:
        """Return the score of the last targets of windows of one length.

        losses: of all bytes of the windows, if they are known; (windows, length).
        ends: of the windows in the text.
        """
        encoding: PositionEncoding = model.encoding  # type: ignore[assignment]
        length = windows[0].shape[1]
        num_targets = self.num_far_targets(config)
        reason = why_length_impossible(encoding, self.longest_stack_input(length, num_targets))
        if reason:
            return FarScore(length, None, None, reason)
        is_far = windows[1][:, -num_targets:]
        if losses is None or not windows[1].all():
            # Mark bytes among the far targets only: masks before them would remove context.
            losses = self._losses_by_byte(model, _keep_last_targets(windows, num_targets), config)
        far = losses[:, -num_targets:]
        if is_far.all():  # the near losses depend on the targets, not on the bytes far before them
            width = min(length, 2 * config.train_length)
            key: tuple[Any, ...] = (width, ends)
        else:
            key = (length, ends)
        if key not in near_losses:
            near_losses[key] = self._losses_near(model, windows, config)
        near = near_losses[key]
        return FarScore(
            length,
            far=nats_to_bits((far.sum() / is_far.sum()).item()),
            far_near=nats_to_bits((near.sum() / is_far.sum()).item()),
            windows=bits_by_window(far, is_far),
            near_windows=bits_by_window(near, is_far),
        )

    def _losses_near(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        """Return the losses in nats of the far targets, (windows, targets), each read in a window
        of the training length that ends at most a piece later.

            |<-------------- window -------------->|
                          |<---- far targets ------>|
                  [ near context | piece 1 ]             each piece is read at the end of a window
                             [ near context | piece 2 ]  of the training length
        """
        length = windows[0].shape[1]
        num_targets = self.num_far_targets(config)
        piece = -(-num_targets // self.near_pieces)  # rounded up
        losses = []
        first = length - num_targets
        while first < length:
            stop = min(first + piece, length)
            start = max(0, stop - config.train_length)
            near = tuple(tensor[:, start:stop] for tensor in windows)
            targets = stop - first
            near = _keep_last_targets(near, targets)
            losses.append(self._losses_by_byte(model, near, config)[:, -targets:])
            first = stop
        return torch.cat(losses, dim=1)

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


class CausalObjective(Objective):
    """Predict the next byte. All bytes are targets; the third tensor of its windows has the byte
    after each one."""

    name = CAUSAL
    model = Decoder
    stacks = (True,)
    near_pieces = 2

    def held_out_targets(self, rows: Tensor) -> MarkedWindows:
        return rows[:, :-1], torch.ones_like(rows[:, :-1], dtype=torch.bool), rows[:, 1:]

    def losses(self, model: nn.Module, windows: MarkedWindows, config: TrialConfig) -> Tensor:
        tokens, is_target, following = windows
        losses = token_losses(model, torch.cat([tokens, following[:, -1:]], dim=1), config)
        return losses.flatten() if is_target.all() else losses[on_device(is_target, config)]


def _keep_last_targets(windows: MarkedWindows, count: int) -> MarkedWindows:
    """Return the windows with no target but among their last `count` bytes."""
    tokens, is_target, *rest = windows
    is_target = is_target.clone()
    is_target[:, :-count] = False
    return tokens, is_target, *rest


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
