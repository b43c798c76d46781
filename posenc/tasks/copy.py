"""Copy a sequence, copy distinct symbols, or reverse a sequence."""

import numpy as np

from posenc.tasks.task import Case, Row, Task, question_then_answer

BEGIN, SEPARATOR, END = 0, 1, 2
"""Tokens before x, between x and the answer, and after the answer."""
FIRST_SYMBOL = 3
"""Token of the first symbol; smaller tokens are BEGIN, SEPARATOR and END."""


class Copy(Task):
    """Complete BEGIN x SEPARATOR by x END, where x are symbols drawn uniformly from 32.

    Source: Kazemnejad et al. 2023, arXiv:2305.19466, appendix D.1, with one token per symbol.
    """

    name = "copy"
    title = "copy symbols of 32 kinds"
    num_symbols = 32
    vocab_size = FIRST_SYMBOL + num_symbols
    end_token = END
    train_length = 20
    test_lengths = (20, 24, 30, 40, 80)
    steps = 2500

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        x = FIRST_SYMBOL + self.draw_symbols(random, case.length)
        return question_then_answer(
            np.array([BEGIN, *x, SEPARATOR]), np.array([*self.answer(x), END])
        )

    def max_tokens(self, case: Case) -> int:
        return 2 * case.length + 2

    def draw_symbols(self, random: np.random.Generator, length: int) -> np.ndarray:
        """Draw `length` symbols, as indices 0 .. num_symbols - 1, (length,); the same one
        may occur several times."""
        return random.integers(0, self.num_symbols, size=length)

    def answer(self, x: np.ndarray) -> np.ndarray:
        """Return the symbols of the right answer to the symbols x, (length,): x itself."""
        return x


class CopyDistinct(Copy):
    """Copy x of different symbols, out of 512: each symbol occurs at one place only."""

    name = "copy_512"
    title = "copy different symbols of 512 kinds"
    num_symbols = 512
    vocab_size = FIRST_SYMBOL + num_symbols
    max_length = num_symbols
    steps = 3500

    def draw_symbols(self, random: np.random.Generator, length: int) -> np.ndarray:
        return random.permutation(self.num_symbols)[:length]


class Reverse(Copy):
    """Complete BEGIN x SEPARATOR by x in reverse order, END."""

    name = "reverse"
    title = "say symbols of 32 kinds backwards"
    steps = 3000

    def answer(self, x: np.ndarray) -> np.ndarray:
        return x[::-1]
