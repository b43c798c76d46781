"""Find facts in a long text of fillers, as in RULER and NoLiMa."""

from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import ClassVar

import numpy as np

from posenc.tasks.puzzles import (
    DrawPuzzle,
    draw_needle_puzzle,
    draw_variables_puzzle,
    draw_word_stream,
    insert_facts,
)
from posenc.tasks.task import Case, Row, Shortcut, Task, question_then_answer

BEGIN = 0
SEPARATOR = 1
FACT = 2
FIRST_SYMBOL = 17
"""Token of the first symbol; tokens between FACT and it are fillers."""
NUM_SYMBOLS = 24
"""Number of symbols."""
DEPTHS = {"at the start": 0.0, "in the middle": 0.5, "at the end": 1.0}
"""Places of the fact that is asked for; elsewhere it is drawn uniformly."""
NUM_COMMON_WORDS = 3
"""Number of frequent words in CommonWords."""


class Far(Task):
    """Read BEGIN, a text, SEPARATOR and a question; predict the answer.

    The text is a puzzle's facts, which begin with FACT, among fillers. Beyond the training length
    each test is repeated with the fact asked for at the start, in the middle and at the end.
    """

    length_unit = "tokens"
    vocabulary = FIRST_SYMBOL + 2 * NUM_SYMBOLS
    train_length = 32
    test_lengths = (32, 64, 128, 512)
    puzzle: ClassVar[DrawPuzzle]
    depths: ClassVar[dict[str, float]] = DEPTHS
    question_offset: ClassVar[int] = 0
    """Added to the token of each symbol in the question, where it then has another name."""

    def cases(self, test_lengths: Sequence[int]) -> tuple[Case, ...]:
        beyond = [length for length in test_lengths if length > test_lengths[0]]
        at_depths = tuple(Case(length, depth) for length in beyond for depth in self.depths)
        return super().cases(test_lengths) + at_depths

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        depth = DEPTHS[case.variant] if case.variant else random.uniform()
        puzzle = type(self).puzzle(random, depth)
        token_of = FIRST_SYMBOL + random.permutation(NUM_SYMBOLS)  # of each symbol of the puzzle
        facts = [(at, [FACT, *token_of[list(symbols)]]) for at, symbols in puzzle.facts]
        # A fact is three tokens: FACT and two symbols.
        fillers = random.integers(FACT + 1, FIRST_SYMBOL, size=case.length - 3 * len(facts))
        text = insert_facts(fillers.tolist(), facts)
        asked = token_of[list(puzzle.question)] + self.question_offset
        question = np.array([BEGIN, *text, SEPARATOR, *asked])
        return question_then_answer(question, token_of[list(puzzle.answer)])

    def max_tokens(self, case: Case) -> int:
        return len(self.draw_row(np.random.default_rng(0), case)[0])


NUM_KEYS = 8
"""Pairs in a text of needles. With few of them, an encoding that reads nothing looks as if it found
some: a guess among the values of the text is right in one of NUM_KEYS."""

NUM_BESIDE = 3
"""Of the other pairs, those next to the one that is asked for: the last pair of a text is then the
right one in a quarter of the texts even where it is asked for at the end."""


class NeedleByMeaning(Far):
    """Read 8 pairs of a name and a value in a text, then another name of one of them, and predict
    its value.

    A name and its other name are two tokens that share nothing: which belong together must be
    learned, as in NoLiMa.

    Source: Modarressi et al. 2025, arXiv:2502.05167, section 3.
    """

    name = "needle_by_meaning"
    title = "find one of eight values by another name of its key"
    min_length = 24
    min_train_length = 24
    train_length = 64
    test_lengths = (64, 128, 256, 1024)
    steps = 2000
    batch = 32
    puzzle = staticmethod(partial(draw_needle_puzzle, count=NUM_KEYS, beside=NUM_BESIDE))
    question_offset = NUM_SYMBOLS
    since_recipe = 7

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"the last value": _last_value}


class Variables(Far):
    """Read assignments of a number from name to name in two chains of 4, and predict the names that
    stand for a number.

    Source: Hsieh et al. 2024, arXiv:2404.06654, section 3, variable tracking.
    """

    name = "variables"
    title = "follow a number from name to name"
    min_length = 24
    min_train_length = 24
    train_length = 64
    test_lengths = (64, 128, 256, 1024)
    steps = 2000
    batch = 32
    puzzle = staticmethod(draw_variables_puzzle)
    since_recipe = 7

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"the chain that is first": _first_chain}


def _last_value(tokens: np.ndarray) -> np.ndarray:
    """Return the value of the last pair of a text, whatever is asked for."""
    last = np.flatnonzero(tokens == FACT)[-1]
    return tokens[last + 2 : last + 3]


def _first_chain(tokens: np.ndarray) -> np.ndarray:
    """Return the names of the chain that starts first in a text, whatever is asked for."""
    at = np.flatnonzero(tokens == FACT)
    facts = [(tokens[i + 1], tokens[i + 2]) for i in at]
    chain = [facts[0][1]]
    for name, value in facts:
        if value in chain:
            chain.append(name)
    return np.array(chain[1:])


class CommonWords(Far):
    """Read words of which 3 occur much more often than the others, and predict these in order.

    Retired: counting words answers it without their order, and of few words several are right.
    Old results of it are still read.

    Source: Hsieh et al. 2024, arXiv:2404.06654, section 3, common words extraction.
    """

    name = "common_words"
    title = "find the most frequent words"
    retired = "counting words answers it without their order; take variables or needle_by_meaning"
    length_unit = "words"
    depths: ClassVar = {}
    min_length = 12
    min_train_length = 12
    steps = 1500

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"counting words": _most_frequent_words}

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        words = FIRST_SYMBOL + random.permutation(NUM_SYMBOLS)
        text = islice(
            draw_word_stream(random, NUM_COMMON_WORDS, NUM_SYMBOLS - NUM_COMMON_WORDS), case.length
        )
        question = np.array([BEGIN, *words[list(text)], SEPARATOR])
        return question_then_answer(question, np.sort(words[:NUM_COMMON_WORDS]))


def _most_frequent_words(tokens: np.ndarray) -> np.ndarray:
    """Return the most frequent words of a text, in the order of their tokens."""
    words, counts = np.unique(tokens[tokens >= FIRST_SYMBOL], return_counts=True)
    most = words[np.argsort(-counts, kind="stable")[:NUM_COMMON_WORDS]]
    return np.sort(most)
