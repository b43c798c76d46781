"""What a task is: sequences made from a seed and a step, the answers in them, and its lengths."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

IGNORED = -100
"""The target where nothing is asked; what torch's cross_entropy leaves out."""
_VALID, _TEST = 1 << 62, 1 << 63
"""First halves of the keys of held-out sequences; those of training are seeds, and smaller."""

Row = tuple[np.ndarray, np.ndarray]
"""The tokens of one sequence, and after each token the target."""


@dataclass(frozen=True)
class Case:
    """One test: sequences of a length, in what the task counts; `variant` says how else they differ
    from those of training, "" where they do not."""

    length: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.length:,}, {self.variant}" if self.variant else f"{self.length:,}"


@dataclass(frozen=True)
class Batch:
    """Sequences for a causal model.

    tokens: (batch, len) int64, what it reads.
    targets: (batch, len) int64, what it should say after each token, or IGNORED.
    positions: (len, 2) int64 of (row, column) where the tokens lie on a grid; None: 0, 1, 2, ...
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None = None


class Task(ABC):
    """A task, with the lengths and the training that it has where the user asks for no others.

    name: as on the command line.
    title: what is asked, in a few words.
    counts: what a length is a number of.
    metric: the score that its table shows, "exact match" or "token accuracy".
    vocabulary: number of tokens.
    end: the token that ends an answer; None where answers have a fixed number of tokens.
    num_axes: components of a position.
    shortest: the shortest sequence in training.
    least: the smallest training length at which there is something to ask.
    most: the longest length that can be made; None: no limit.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    counts: ClassVar[str] = "symbols"
    metric: ClassVar[str] = "exact match"
    end: ClassVar[int | None] = None
    num_axes: ClassVar[int] = 1
    shortest: ClassVar[int] = 1
    least: ClassVar[int] = 2
    most: ClassVar[int | None] = None
    vocabulary: ClassVar[int]
    train_length: ClassVar[int]
    test_lengths: ClassVar[tuple[int, ...]]
    steps: ClassVar[int]
    batch: ClassVar[int] = 64

    @abstractmethod
    def row(self, random: np.random.Generator, case: Case) -> Row:
        """One sequence."""

    @abstractmethod
    def tokens(self, case: Case) -> int:
        """How many tokens the model reads in such a sequence, at most."""

    def shape_length(self, train_length: int) -> int:
        """How long an encoding is told that sequences are in training."""
        return self.tokens(Case(train_length))

    def cases(self, test_lengths: Sequence[int]) -> tuple[Case, ...]:
        """What a trained model is tested on, the training length first; of that length alone there
        is one test, with sequences as in training."""
        return tuple(Case(length) for length in test_lengths)

    def train_row(self, random: np.random.Generator, train_length: int) -> Row:
        """One sequence of training, of a length drawn evenly up to the training length."""
        return self.row(random, Case(int(random.integers(self.shortest, train_length + 1))))

    def train_batch(self, seed: int, step: int, batch: int, train_length: int) -> Batch:
        """The batch of a step, drawn from the seed and the step and nothing else."""
        return self._drawn(_random(seed, step), batch, train_length)

    def valid_batch(self, batch: int, train_length: int) -> Batch:
        """Held-out sequences like those of training, the same for all seeds."""
        return self._drawn(_random(_VALID, train_length), batch, train_length)

    def test_batch(self, case: Case, batch: int, train_length: int) -> Batch:
        """Held-out sequences of a case, the same for all seeds and encodings. Only what lies beyond
        the training length is asked where a sequence has targets within it too."""
        random = _random(_TEST, case.length, zlib.crc32(case.variant.encode()))
        rows = [self.row(random, case) for _ in range(batch)]
        return self.beyond(stacked(rows, len(rows[0][0])), case, train_length)

    def beyond(self, batch: Batch, case: Case, train_length: int) -> Batch:
        """The batch with targets that need nothing unseen left out."""
        return batch

    def check(self, train_length: int, test_lengths: Sequence[int]) -> None:
        """Raises: ValueError for lengths that the task cannot make."""
        for option, length, least in (
            ("--train-length", train_length, self.least),
            *(("--test-lengths", length, train_length) for length in test_lengths),
        ):
            if length < least or (self.most is not None and length > self.most):
                most = "" if self.most is None else f" to {self.most:,}"
                raise ValueError(
                    f"{option}: the task {self.name} takes {least:,}{most or ' or more'} "
                    f"{self.counts}, got {length:,}."
                )

    def _drawn(self, random: np.random.Generator, batch: int, train_length: int) -> Batch:
        rows = [self.train_row(random, train_length) for _ in range(batch)]
        return stacked(rows, self.tokens(Case(train_length)))


def stacked(rows: Sequence[Row], width: int) -> Batch:
    """Rows of any lengths up to `width`, filled up behind with token 0 and no target."""
    tokens = np.zeros((len(rows), width), np.int64)
    targets = np.full((len(rows), width), IGNORED, np.int64)
    for i, (row, wanted) in enumerate(rows):
        tokens[i, : len(row)] = row
        targets[i, : len(row)] = wanted
    return Batch(tokens, targets)


def answered(question: np.ndarray, answer: np.ndarray) -> Row:
    """A question and its answer, of which each token is asked after the one before it."""
    whole = np.concatenate([question, answer])
    targets = np.full(len(whole) - 1, IGNORED, np.int64)
    targets[len(question) - 1 :] = answer
    return whole[:-1], targets


def _random(first: int, second: int, third: int = 0) -> np.random.Generator:
    key = np.array([first, second + (third << 32)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
