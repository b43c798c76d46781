"""A text of any length that never repeats itself for long."""

import random

WORDS = "the quick brown fox jumps over a lazy dog that sat on its mat and did not see it".split()


def prose(size: int) -> bytes:
    """Words in random order, always the same, cut to `size` bytes."""
    drawn = random.Random(0).choices(WORDS, k=size // 2)
    return " ".join(drawn).encode()[:size]
