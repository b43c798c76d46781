"""Recall values by their keys after a gap of fillers."""

from collections.abc import Sequence

import numpy as np

from posenc.tasks.task import IGNORED_TARGET, Case, Row, Task

BEGIN, SEPARATOR = 0, 1
"""Tokens before the pairs, and before the keys that are asked for."""
NUM_KEYS = 24
NUM_VALUES = 24
NUM_FILLERS = 14
"""Numbers of different keys, values and fillers; chosen, not derived."""
FIRST_KEY = 2
FIRST_VALUE = FIRST_KEY + NUM_KEYS
FIRST_FILLER = FIRST_VALUE + NUM_VALUES
MIN_PAIRS = 2
MAX_PAIRS = 8
"""Minimum and maximum number of pairs in a training sequence. Tests have MAX_PAIRS."""
NUM_PAIRS_OF_VARIANT = 16
"""Number of pairs in the variant of the test that has more of them than training."""
_VARIANT = f"{NUM_PAIRS_OF_VARIANT} pairs"


class Recall(Task):
    """Read BEGIN k v k v ... fillers SEPARATOR, where different keys k have values v. Then read
    each key, in a new order, and predict its value.

    Training has 2 to 8 pairs and 0 to 16 fillers. Tests have 8 pairs and longer gaps, and once 16
    pairs with the gap of training.

    train_length: maximum number of fillers in a training sequence.
    """

    name = "recall"
    title = f"recall the values of {MAX_PAIRS} keys behind a gap"
    length_unit = "fillers"
    metric = "token accuracy"
    vocab_size = FIRST_FILLER + NUM_FILLERS
    min_length = 0
    min_train_length = 0
    train_length = 16
    test_lengths = (16, 64, 256, 1024)
    steps = 1500

    def cases(self, test_lengths: Sequence[int]) -> tuple[Case, ...]:
        usual_cases = super().cases(test_lengths)
        return (
            usual_cases
            if len(usual_cases) == 1
            else (*usual_cases, Case(test_lengths[0], _VARIANT))
        )

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        return self._draw_row(random, _num_pairs(case), case.length)

    def draw_train_row(self, random: np.random.Generator, train_length: int) -> Row:
        num_pairs = int(random.integers(MIN_PAIRS, MAX_PAIRS + 1))
        num_fillers = int(random.integers(0, train_length + 1))
        return self._draw_row(random, num_pairs, num_fillers)

    def max_tokens(self, case: Case) -> int:
        return 4 * _num_pairs(case) + case.length + 1

    def _draw_row(self, random: np.random.Generator, num_pairs: int, num_fillers: int) -> Row:
        """Draw pairs of a key and its value, then fillers, then the same pairs in another order:
        (tokens, targets). The targets are the values of the second part."""
        keys = FIRST_KEY + random.permutation(NUM_KEYS)[:num_pairs]
        values = FIRST_VALUE + random.integers(0, NUM_VALUES, size=num_pairs)
        fillers = FIRST_FILLER + random.integers(0, NUM_FILLERS, size=num_fillers)
        order_of_questions = random.permutation(num_pairs)
        facts = np.stack([keys, values], axis=1)
        tokens = np.concatenate(
            [[BEGIN], facts.ravel(), fillers, [SEPARATOR], facts[order_of_questions].ravel()[:-1]]
        )
        targets = np.full(len(tokens), IGNORED_TARGET, np.int64)
        # Before the first key that is asked for are BEGIN, the pairs, the fillers and SEPARATOR.
        targets[2 * num_pairs + num_fillers + 2 :: 2] = values[order_of_questions]
        return tokens, targets


def _num_pairs(case: Case) -> int:
    """Return the number of pairs in a case: NUM_PAIRS_OF_VARIANT in the variant, else MAX_PAIRS."""
    return NUM_PAIRS_OF_VARIANT if case.variant == _VARIANT else MAX_PAIRS
