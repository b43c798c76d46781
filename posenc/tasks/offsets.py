"""Find the symbol at a given distance before each symbol."""

import numpy as np

from posenc.tasks.task import IGNORED_TARGET, Case, Row, Task

DISTANCES = (3, 7, 13)
"""Distances of Offset, named by tokens 0, 1 and 2."""
NUM_SYMBOLS = 32
"""Number of different symbols; chosen, not derived."""


class Offset(Task):
    """Read a token that names a distance, then symbols. After each symbol predict the symbol that
    many places before it.

    All training sequences have the full length, because in a causal model each contains all shorter
    ones. In tests only symbols after the training length are scored.
    """

    name = "offset"
    title = f"say the symbol {', '.join(map(str, DISTANCES[:-1]))} or {DISTANCES[-1]} places before"
    metric = "token accuracy"
    vocab_size = len(DISTANCES) + NUM_SYMBOLS
    min_train_length = DISTANCES[-1] + 1
    train_length = 64
    test_lengths = (64, 128, 256, 512, 1024)
    steps = 1000
    batch = 32

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        distance_token = int(random.integers(len(DISTANCES)))
        distance = DISTANCES[distance_token]
        x = len(DISTANCES) + random.integers(0, NUM_SYMBOLS, size=case.length)
        targets = np.full(case.length + 1, IGNORED_TARGET, np.int64)
        targets[1 + distance :] = x[:-distance]
        return np.array([distance_token, *x]), targets

    def draw_train_row(self, random: np.random.Generator, train_length: int) -> Row:
        return self.draw_row(random, Case(train_length))

    def max_tokens(self, case: Case) -> int:
        return case.length + 1

    def tokens_of_training_length(self, case: Case, train_length: int) -> slice:
        return slice(train_length + 1)
