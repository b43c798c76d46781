"""Base class of tasks: sequences generated from a seed and a step, answers, lengths."""

import hashlib
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

IGNORED_TARGET = -100
"""Target of tokens that are not scored; torch's cross_entropy ignores it."""
_VALIDATION_KEY, _TEST_KEY = 1 << 62, 1 << 63
"""First argument of `_random_generator` for validation and for tests. For training it is the seed,
which is smaller, so that no training sequence is drawn again as a held-out one."""

Shortcut = Callable[[np.ndarray], np.ndarray]
"""Answers one sequence without doing the task: takes its tokens, (len,); returns a guess for each
of its targets, in order."""
Row = tuple[np.ndarray, np.ndarray]
"""One sequence: its tokens, and the target after each token, (len,) each."""


@dataclass(frozen=True)
class Case:
    """Describe a test: sequences of one length.

    length: in units of `Task.length_unit`.
    variant: name of another difference from training, such as "16 pairs"; "" if there is none.
    """

    length: int
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.length:,}, {self.variant}" if self.variant else f"{self.length:,}"


@dataclass(frozen=True)
class Batch:
    """Hold sequences for a causal model.

    tokens: (batch, len) int64, the input.
    targets: (batch, len) int64, the right answer after each token, or IGNORED_TARGET.
    positions: (len, 2) float64 of (row, column) for tokens on a grid, NaN for a token that is not
        on it. None for tokens in a line, whose positions are 0, 1, 2, ...
    """

    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None = None


class Task(ABC):
    """Define a generated task, with default lengths and training.

    name: name on the command line.
    title: a short description, as a verb: "copy symbols of 32 kinds".
    length_unit: what all lengths of the task count, such as "symbols" or "words".
    metric: score shown in its table, "exact match" or "token accuracy".
    vocab_size: number of different tokens; a token is an integer below it.
    end_token: token that ends an answer; None if answers have a fixed number of tokens.
    num_axes: components of a position.
    looks_both_ways: every token sees all others, as in a Vision Transformer; False: those before
        it.
    min_length: the smallest length of a training sequence; the largest is the training length.
    min_train_length: the smallest training length at which all sequences have a target.
    max_length: the largest possible length; None if there is no limit.
    train_length: default of the largest length in training.
    test_lengths: default lengths of the tests; the first is `train_length`.
    steps: default number of training steps.
    batch: default number of sequences in a training step.

    The defaults are chosen, not derived.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    length_unit: ClassVar[str] = "symbols"
    metric: ClassVar[str] = "exact match"
    end_token: ClassVar[int | None] = None
    num_axes: ClassVar[int] = 1
    looks_both_ways: ClassVar[bool] = False
    min_length: ClassVar[int] = 1
    min_train_length: ClassVar[int] = 2
    max_length: ClassVar[int | None] = None
    vocab_size: ClassVar[int]
    train_length: ClassVar[int]
    test_lengths: ClassVar[tuple[int, ...]]
    steps: ClassVar[int]
    batch: ClassVar[int] = 64

    why_retired: ClassVar[str] = ""
    """The reason why the task is not offered any more, though old results of it can be read; "" if
    it is offered."""

    since_recipe: ClassVar[int] = 0
    """The recipe of posenc.compare since which the task's sequences are drawn as they are now."""

    def shortcuts(self) -> dict[str, Shortcut]:
        """Return functions that answer this task without doing it, by a description such as "the
        last value"; {} if none is known. `posenc.tasks.scoring` has others, which fit every
        task."""
        return {}

    @abstractmethod
    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        """Draw one sequence of a case: (tokens, targets), each (len,) int64."""

    @abstractmethod
    def max_tokens(self, case: Case) -> int:
        """Return the maximum number of tokens that a model reads in a sequence of the case."""

    def encoding_train_length(self, train_length: int) -> int:
        """Return the number of tokens in the longest training sequence, for which an encoding is
        built. train_length: in units of `length_unit`."""
        return self.max_tokens(Case(train_length))

    def cases(self, test_lengths: Sequence[int]) -> tuple[Case, ...]:
        """Return the tests of a trained model: one for each length, in order, and then the variants
        of the task. test_lengths: the first is the training length. If it is the only one, there
        are no variants."""
        return tuple(Case(length) for length in test_lengths)

    def draw_train_row(self, random: np.random.Generator, train_length: int) -> Row:
        """Draw one training sequence, of a length drawn uniformly up to the training length."""
        return self.draw_row(random, Case(int(random.integers(self.min_length, train_length + 1))))

    def train_batch(self, seed: int, step: int, batch_size: int, train_length: int) -> Batch:
        """Return the training batch of a step: `batch_size` sequences with lengths up to
        `train_length`, in units of `length_unit`. The same arguments give the same sequences."""
        return self._draw_training_batch(_random_generator(seed, step), batch_size, train_length)

    def valid_batch(self, batch_size: int, train_length: int) -> Batch:
        """Return `batch_size` held-out sequences with the lengths of training, up to
        `train_length`, in units of `length_unit`. The same arguments give the same sequences."""
        return self._draw_training_batch(
            _random_generator(_VALIDATION_KEY, train_length), batch_size, train_length
        )

    def test_batch(self, case: Case, batch_size: int, train_length: int) -> Batch:
        """Return `batch_size` held-out sequences of a case. The same arguments give the same
        sequences.

        In a case longer than `train_length`, the targets in `tokens_of_training_length` are
        replaced by IGNORED_TARGET."""
        random = _random_generator(_TEST_KEY, case.length, zlib.crc32(case.variant.encode()))
        rows = [self.draw_row(random, case) for _ in range(batch_size)]
        batch = stack_rows(rows, len(rows[0][0]))
        if case.length > train_length:
            batch.targets[:, self.tokens_of_training_length(case, train_length)] = IGNORED_TARGET
        return batch

    def tokens_of_training_length(self, case: Case, train_length: int) -> slice | np.ndarray:
        """Return the tokens of a test that a model can predict if it has learned the training
        length only: a slice, or a boolean mask (len,). None of them by default."""
        return slice(0)

    def check_lengths(self, train_length: int, test_lengths: Sequence[int]) -> None:
        """Raise ValueError for lengths at which the task has no sequences: below its minimum, above
        its maximum, or a test shorter than the training length. The message names the option of the
        length."""
        option_and_length = [("--train-length", train_length)]
        option_and_length += [("--test-lengths", length) for length in test_lengths]
        for option, length in option_and_length:
            is_too_long = self.max_length is not None and length > self.max_length
            if length < self.min_train_length or is_too_long:
                upper_end_in_words = (
                    "or more" if self.max_length is None else f"to {self.max_length:,}"
                )
                raise ValueError(
                    f"{option}: the task {self.name} takes {self.min_train_length:,} "
                    f"{upper_end_in_words} {self.length_unit}, got {length:,}."
                )
            if length < train_length:
                raise ValueError(
                    f"--test-lengths: the task {self.name} is tested at the training length or "
                    f"beyond, {train_length:,} {self.length_unit} or more, got {length:,}."
                )

    def hash_sequences(self, train_length: int, test_lengths: tuple[int, ...]) -> str:
        """Return a hash of a sample of the task's sequences, as 16 hexadecimal digits. A changed
        task gives another hash, so that results of the old one are not reused.

        train_length, test_lengths: as in `check_lengths`.
        """
        digest = hashlib.sha256()
        batches = [self.train_batch(0, 0, 8, train_length), self.valid_batch(8, train_length)]
        batches += [self.test_batch(case, 2, train_length) for case in self.cases(test_lengths)]
        for batch in batches:
            digest.update(batch.tokens.astype("<i8").tobytes())
            digest.update(batch.targets.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def _draw_training_batch(
        self, random: np.random.Generator, batch_size: int, train_length: int
    ) -> Batch:
        """Draw `batch_size` training sequences of random lengths, padded at the end to the number
        of tokens of the longest possible one."""
        rows = [self.draw_train_row(random, train_length) for _ in range(batch_size)]
        return stack_rows(rows, self.max_tokens(Case(train_length)))


def stack_rows(rows: Sequence[Row], width: int) -> Batch:
    """Return sequences as one batch, padded at the end to `width` tokens with token 0, which has no
    target (IGNORED_TARGET)."""
    tokens = np.zeros((len(rows), width), np.int64)
    targets = np.full((len(rows), width), IGNORED_TARGET, np.int64)
    for i, (row_tokens, row_targets) in enumerate(rows):
        tokens[i, : len(row_tokens)] = row_tokens
        targets[i, : len(row_tokens)] = row_targets
    return Batch(tokens, targets)


def question_then_answer(question: np.ndarray, answer: np.ndarray) -> Row:
    """Return question and answer as one sequence without its last token, and the targets: the next
    token where that is one of the answer, else IGNORED_TARGET.

    [7, 8], [5, 6] -> tokens [7, 8, 5], targets [-100, 5, 6]
    """
    sequence = np.concatenate([question, answer])
    targets = np.full(len(sequence) - 1, IGNORED_TARGET, np.int64)
    targets[len(question) - 1 :] = answer
    return sequence[:-1], targets


def _random_generator(first: int, second: int, third: int = 0) -> np.random.Generator:
    """Return a random generator that depends on three numbers only, and is the same in every
    process and on every machine. first, second: from 0 to 2^64 - 1. third: from 0 to 2^32 - 1."""
    key = np.array([first, second + (third << 32)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))
