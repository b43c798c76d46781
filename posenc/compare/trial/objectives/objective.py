"""The base class of objectives: a model, its targets in windows of a text, and its test."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.results import LengthScore, PositionScore
from posenc.compare.trial.config import CAUSAL, TrialConfig
from posenc.compare.trial.evaluate import evaluate_lengths
from posenc.compare.trial.forward import token_losses
from posenc.models import Decoder

Asked = tuple[Tensor, ...]
"""Windows and their targets: tensors with one row for each window."""
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

    @abstractmethod
    def ask(self, rows: Tensor, seed: int, step: int) -> Asked:
        """Return the windows and targets of a training step, from rows of length + 1 symbols."""

    @abstractmethod
    def ask_held_out(self, rows: Tensor) -> Asked:
        """Return held-out windows and targets, the same for all seeds."""

    def count(self, asked: Asked) -> int:
        """Return the number of target bytes: by default those that the second tensor marks."""
        return int(asked[1].sum())

    @abstractmethod
    def losses(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        """Return the cross-entropy in nats of each target byte, row by row."""

    @abstractmethod
    def test(self, model: nn.Module, symbols: np.ndarray, config: TrialConfig) -> Scores:
        """Return bits per byte on held-out text at every length.

        Raises: FloatingPointError for a loss that is not finite.
        """

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
    """Predict the next byte."""

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
