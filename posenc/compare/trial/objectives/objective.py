"""What an objective is: a model, what it is asked of windows of a text, and its test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from posenc.compare.results import LengthScore, PositionScore
from posenc.compare.trial.config import TrialConfig

Asked = tuple[Tensor, ...]
"""What is asked of windows: tensors that have one row for each of them."""
Scores = tuple[tuple[LengthScore, ...], tuple[PositionScore, ...], tuple[LengthScore, ...]]
"""By length, by position in the longest window, and by context before the same targets."""


class Objective(ABC):
    """What a model learns to say of a text.

    name: as on the command line.
    model: makes the model from its sizes and one encoding for each of its stacks.
    stacks: whether each stack of layers that takes an encoding is causal; the last one is that of
        which a report shows what the encoding was built with.
    marks: symbols that the model reads beside those of the text.
    said: a sentence of the report on what is scored; "" where that is every byte.
    """

    name: ClassVar[str]
    model: ClassVar[Callable[..., nn.Module]]
    stacks: ClassVar[tuple[bool, ...]]
    marks: ClassVar[int] = 0
    said: ClassVar[str] = ""

    @abstractmethod
    def ask(self, rows: Tensor, seed: int, step: int) -> Asked:
        """What a step of training asks of windows, (rows, length + 1) symbols with the one after
        each of them."""

    @abstractmethod
    def ask_held_out(self, rows: Tensor) -> Asked:
        """The same of held-out windows, for all seeds alike."""

    def count(self, asked: Asked) -> int:
        """How many bytes are asked: by default those that the second tensor marks."""
        return int(asked[1].sum())

    @abstractmethod
    def losses(self, model: nn.Module, asked: Asked, config: TrialConfig) -> Tensor:
        """Cross-entropy in nats of each byte that is asked, row by row."""

    @abstractmethod
    def test(self, model: nn.Module, symbols: np.ndarray, config: TrialConfig) -> Scores:
        """Bits per byte on held-out text at every length.

        Raises: FloatingPointError for a loss that is not finite.
        """

    def longest_part(self, length: int, said: int | None = None) -> int:
        """How many positions a stack counts in a window of this length at most, where the last
        `said` bytes are asked."""
        return length

    def cut(self, whole: Asked, length: int) -> Iterator[Asked]:
        """Held-out windows and what is asked of them, of which every byte is asked once, as pieces
        of `length` that ask the same bytes; then what remains."""
        longest = whole[0].shape[1]
        stop = longest // length * length
        starts = range(0, stop, length)
        yield tuple(torch.cat([each[:, s : s + length] for s in starts]) for each in whole)
        if stop < longest:
            yield tuple(each[:, stop:] for each in whole)
