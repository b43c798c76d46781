"""Remember the last bit that was written, among instructions to write, read or ignore bits."""

from collections.abc import Sequence

import numpy as np

from posenc.tasks.task import IGNORED_TARGET, Case, Row, Shortcut, Task

WRITE = 2
READ = 3
IGNORE = 4
"""Tokens of the instructions; the bits are tokens 0 and 1."""
IGNORE_FRACTION = 0.8
_IGNORE_FRACTION_OF_VARIANT = {"": IGNORE_FRACTION, "98 % ignored": 0.98, "10 % ignored": 0.1}
"""Fraction of IGNORE among the instructions, by variant of the test."""
VARIANT_LENGTH_FACTOR = 2
"""Length of the sparse and dense tests, in multiples of the training length."""


class FlipFlop(Task):
    """Read pairs of an instruction and a bit; after each READ predict the bit that was written
    last.

    The first instruction writes, the last one reads. Of the others 80 % are IGNORE, and WRITE and
    READ are equally frequent. Tests are longer, and at twice the training length also sparser (98 %
    IGNORE, so the last write is far back) and denser (10 %).

    Source: Liu et al. 2023, arXiv:2306.00946, section 3.
    """

    name = "flip_flop"
    title = "keep the bit that was written last"
    length_unit = "instructions"
    metric = "token accuracy"
    vocab_size = 5
    min_length = 4
    min_train_length = 4
    train_length = 32
    test_lengths = (32, 64, 128, 256)
    steps = 1500

    def cases(self, test_lengths: Sequence[int]) -> tuple[Case, ...]:
        usual_cases = super().cases(test_lengths)
        if len(usual_cases) <= 1:
            return usual_cases
        length = VARIANT_LENGTH_FACTOR * test_lengths[0]
        return usual_cases + tuple(
            Case(length, variant) for variant in _IGNORE_FRACTION_OF_VARIANT if variant
        )

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        num_pairs = case.length
        ignored_fraction = _IGNORE_FRACTION_OF_VARIANT[case.variant]
        fraction_of_others = (1 - ignored_fraction) / 2
        instructions = random.choice(
            [WRITE, READ, IGNORE],
            size=num_pairs,
            p=[fraction_of_others, fraction_of_others, ignored_fraction],
        )
        instructions[0] = WRITE
        instructions[-1] = READ
        bits = random.integers(0, 2, size=num_pairs)
        last_write_indices = np.maximum.accumulate(
            np.where(instructions == WRITE, np.arange(num_pairs), 0)
        )
        bits = np.where(instructions == READ, bits[last_write_indices], bits)
        tokens = np.stack([instructions, bits], axis=1).ravel()[:-1]
        targets = np.full(2 * num_pairs - 1, IGNORED_TARGET, np.int64)
        targets[::2] = np.where(instructions == READ, bits, IGNORED_TARGET)
        return tokens, targets

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"the bit read last": _last_read, "most of the bits written": _majority_written}

    def max_tokens(self, case: Case) -> int:
        return 2 * case.length - 1


def _last_read(tokens: np.ndarray) -> np.ndarray:
    """Return for each READ the bit of the READ before it, which is a guess at the answer; for the
    first READ, the first bit.

    tokens: of one sequence of FlipFlop, (len,). The result has a bit for each READ.
    """
    instructions = tokens[::2]
    bits = tokens[1::2]
    read_indices = np.flatnonzero(instructions == READ)
    earlier_answers = bits[read_indices[:-1]]
    return np.concatenate([bits[:1], earlier_answers])


def _majority_written(tokens: np.ndarray) -> np.ndarray:
    """Return for each READ the bit that was written more often before it, which is a guess at the
    answer; the bit that was written first if both were written equally often.

    tokens: of one sequence of FlipFlop, (len,). The result has a bit for each READ.
    """
    instructions = tokens[::2]
    bits = tokens[1::2]
    guesses = []
    for read_index in np.flatnonzero(instructions == READ):
        written_bits = bits[:read_index][instructions[:read_index] == WRITE]
        fraction_of_ones = written_bits.mean()
        guesses.append(
            int(fraction_of_ones > 0.5) if fraction_of_ones != 0.5 else int(written_bits[0])
        )
    return np.array(guesses)
