"""Hide facts in a long text of fillers and ask for them, as in RULER and NoLiMa: needles, chains of
variables, frequent words.

A puzzle is drawn in symbols without a text. The tasks here write it in tokens, and `posenc extend`
in words.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import ClassVar, NamedTuple

import numpy as np

from posenc.tasks.task import Case, Row, Shortcut, Task, question_then_answer

BEGIN, SEPARATOR, FACT = 0, 1, 2
"""Tokens before a text, before the question, and before each fact."""
FIRST_SYMBOL = 17
"""Token of the first symbol; tokens between FACT and it are fillers."""
NUM_SYMBOLS = 24
"""Number of symbols."""
DEPTHS = {"at the start": 0.0, "in the middle": 0.5, "at the end": 1.0}
"""Depths of the fact that is asked for, by the name of the test's variant. In other tests the depth
is drawn uniformly."""
NUM_NEEDLES = 4
"""Number of pairs in a puzzle of `draw_needles_puzzle`."""
NUM_KEYS = 8
"""Number of pairs in a text of NeedleByMeaning. A guess among the values of the text is right in
one of NUM_KEYS cases, so with few pairs a model that finds nothing would have a high score."""
NUM_BESIDE = 3
"""Number of other pairs next to the one that is asked for. If that is at the end of a text, the
last pair of the text is thus the right one in a quarter of the texts only."""
CHAIN_LENGTH = 4
"""Number of names in a chain of assignments."""


class Puzzle(NamedTuple):
    """Hold the facts of a text, a question about them, and its answer, in symbols 0, 1, 2, ... A
    task writes each symbol as a token, `posenc extend` as a word."""

    facts: tuple[tuple[float, tuple[int, int]], ...]
    """Each fact with its depth, from 0 at the start of the text to 1 at its end: (depth, pair of
    symbols)."""
    question: tuple[int, ...]
    """Symbols of the question: the answer has their partners."""
    answer: tuple[int, ...]
    """Symbols of the right answer, in order."""


DrawPuzzle = Callable[[np.random.Generator, float], Puzzle]
"""Takes a random generator and a depth. Draws a puzzle whose question is about a fact at that
depth."""


def draw_needle_puzzle(
    random: np.random.Generator, depth: float, num_pairs: int = 1, num_beside: int = 0
) -> Puzzle:
    """Draw a puzzle of `num_pairs` pairs of symbols, the first at `depth` and the others anywhere.
    The question is the first symbol of the pair at `depth`, and the answer its second symbol.

    num_beside: number of the other pairs that are at `depth` too, next to the first pair in any
    order, so that the pair asked for is not always the first or the last of a text. At most
    num_pairs - 1.

    draw_needle_puzzle(random, 0.5) -> Puzzle(facts=((0.5, (0, 1)),), question=(0,), answer=(1,))
    """
    depths = [float(depth)] * (1 + num_beside)
    depths += random.uniform(0, 1, num_pairs - 1 - num_beside).tolist()
    facts = tuple((depth_of_fact, (i, num_pairs + i)) for i, depth_of_fact in enumerate(depths))
    if num_beside:  # facts at one depth stay in their order
        facts = tuple(facts[i] for i in random.permutation(num_pairs).tolist())
    return Puzzle(facts, (0,), (num_pairs,))


draw_needles_puzzle = partial(draw_needle_puzzle, num_pairs=NUM_NEEDLES)


def draw_variables_puzzle(random: np.random.Generator, depth: float) -> Puzzle:
    """Draw a puzzle of two chains, in each of which a number is passed from name to name. The
    question is the number of one chain, and the answer its names.

    Both chains start at `depth`, next to each other, in either order: only the question shows which
    one is asked for. The numbers are the last two symbols.
    """
    facts: list[tuple[float, tuple[int, int]]] = []
    for chain_index in random.permutation(2).tolist():  # facts at one depth stay in this order
        depths = [depth, *np.sort(random.uniform(depth, 1, CHAIN_LENGTH - 1)).tolist()]
        value_symbol = 2 * CHAIN_LENGTH + chain_index  # the number, then the name that got it last
        for name_symbol, fact_depth in zip(
            range(CHAIN_LENGTH * chain_index, CHAIN_LENGTH * (chain_index + 1)), depths, strict=True
        ):
            facts.append((fact_depth, (name_symbol, value_symbol)))
            value_symbol = name_symbol
    return Puzzle(tuple(facts), (2 * CHAIN_LENGTH,), tuple(range(CHAIN_LENGTH)))


def draw_word_stream(random: np.random.Generator, num_common: int, num_rare: int) -> Iterator[int]:
    """Yield symbols without end. Half of them are the common symbols 0 .. num_common - 1, each
    equally often. The other half are rare symbols, num_common .. num_common + num_rare - 1.

    num_rare: at least `num_common`, because each common symbol is yielded together with a different
    rare one.
    """
    while True:
        # As many rare ones are mixed in as there are common ones, others each time.
        symbols = [*range(num_common), *(num_common + random.permutation(num_rare)[:num_common])]
        yield from (int(symbol) for symbol in random.permutation(symbols))


def insert_facts(text: Sequence[int], facts: Sequence[tuple[float, Sequence[int]]]) -> list[int]:
    """Return a text of tokens with facts inserted. facts: (depth, tokens) of each; depth 0 is the
    start of the text, 1 its end.

    >>> insert_facts([7, 7, 7, 7], [(0.5, [1, 2])])
    [7, 7, 1, 2, 7, 7]
    """
    with_facts: list[int] = []
    num_copied = 0  # tokens of the text that are in the result already
    for depth, tokens in sorted(facts, key=lambda fact: fact[0]):
        stop = round(depth * len(text))
        with_facts += [*text[num_copied:stop], *tokens]
        num_copied = stop
    return [*with_facts, *text[num_copied:]]


class FactsInText(Task):
    """Base class of tasks that read BEGIN, a text, SEPARATOR and a question, and predict the
    answer.

    The text has the facts of a puzzle, each after FACT, among fillers. Tests beyond the training
    length are repeated with the fact asked for at the start, in the middle and at the end.
    """

    length_unit = "tokens"
    vocab_size = FIRST_SYMBOL + 2 * NUM_SYMBOLS
    train_length = 32
    test_lengths = (32, 64, 128, 512)
    draw_puzzle: ClassVar[DrawPuzzle]
    depths: ClassVar[dict[str, float]] = DEPTHS
    question_offset: ClassVar[int] = 0
    """Number added to the token of a symbol in the question, so that the question names the symbol
    by another token than the text; 0 for the same token."""

    def cases(self, test_lengths: Sequence[int]) -> tuple[Case, ...]:
        longer_lengths = [length for length in test_lengths if length > test_lengths[0]]
        longer_cases = tuple(
            Case(length, variant) for length in longer_lengths for variant in self.depths
        )
        return super().cases(test_lengths) + longer_cases

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        depth = DEPTHS[case.variant] if case.variant else random.uniform()
        puzzle = type(self).draw_puzzle(random, depth)
        token_of = FIRST_SYMBOL + random.permutation(NUM_SYMBOLS)  # of each symbol of the puzzle
        facts = [
            (depth_of_fact, [FACT, *token_of[list(symbols)]])
            for depth_of_fact, symbols in puzzle.facts
        ]
        # A fact is three tokens: FACT and two symbols.
        fillers = random.integers(FACT + 1, FIRST_SYMBOL, size=case.length - 3 * len(facts))
        text = insert_facts(fillers.tolist(), facts)
        question_tokens = token_of[list(puzzle.question)] + self.question_offset
        question_with_text = np.array([BEGIN, *text, SEPARATOR, *question_tokens])
        return question_then_answer(question_with_text, token_of[list(puzzle.answer)])

    def max_tokens(self, case: Case) -> int:
        return len(self.draw_row(np.random.default_rng(0), case)[0])


class NeedleByMeaning(FactsInText):
    """Read a text with 8 pairs of a name and a value, then another name of one pair, and predict
    its value.

    Each name has one other name, with which it shares no token. Which two belong together must be
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
    draw_puzzle = staticmethod(
        partial(draw_needle_puzzle, num_pairs=NUM_KEYS, num_beside=NUM_BESIDE)
    )
    question_offset = NUM_SYMBOLS
    since_recipe = 7

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"the last value": _last_value, "one of the values": _one_of_the_values}


class Variables(FactsInText):
    """Read a text with two chains of 4 names, in each of which a number is assigned from name to
    name, then one number, and predict the names that have it.

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
    draw_puzzle = staticmethod(draw_variables_puzzle)
    since_recipe = 7

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"the chain that is first": _first_chain}


def _last_value(tokens: np.ndarray) -> np.ndarray:
    """Return the value of the last pair in a text, (1,), which is a guess at the answer.

    tokens: of one sequence of NeedleByMeaning, (len,).
    """
    last_fact_index = np.flatnonzero(tokens == FACT)[-1]
    return tokens[last_fact_index + 2 : last_fact_index + 3]


def _one_of_the_values(tokens: np.ndarray) -> np.ndarray:
    """Return one value of a text, (1,), which is a guess at the answer.

    tokens: of one sequence of NeedleByMeaning, (len,).
    """
    values = tokens[np.flatnonzero(tokens == FACT) + 2]
    # As good as drawn: shortcuts take no generator.
    return values[[tokens.sum() % len(values)]]


def _first_chain(tokens: np.ndarray) -> np.ndarray:
    """Return the names of the chain that starts first in a text, which is a guess at the answer.

    tokens: of one sequence of Variables, (len,).
    """
    fact_indices = np.flatnonzero(tokens == FACT)
    facts = [(tokens[i + 1], tokens[i + 2]) for i in fact_indices]
    chain = [facts[0][1]]
    for name, value in facts:
        if value in chain:
            chain.append(name)
    return np.array(chain[1:])


class CommonWords(FactsInText):
    """Read a text of words, of which 3 occur much more often than the others, and predict these 3,
    sorted by token.

    Retired, because counting words answers it without their order, and in short texts several
    answers are right. Old results are still read.

    Source: Hsieh et al. 2024, arXiv:2404.06654, section 3, common words extraction.
    """

    name = "common_words"
    title = "find the most frequent words"
    why_retired = (
        "counting words answers it without their order; take variables or needle_by_meaning"
    )
    length_unit = "words"
    depths: ClassVar = {}
    min_length = 12
    min_train_length = 12
    steps = 1500

    num_common: ClassVar[int] = 3
    """Number of frequent words, which are the answer."""

    def shortcuts(self) -> dict[str, Shortcut]:
        return {"counting words": _most_frequent_words}

    def draw_row(self, random: np.random.Generator, case: Case) -> Row:
        token_of = FIRST_SYMBOL + random.permutation(NUM_SYMBOLS)
        symbols = islice(
            draw_word_stream(random, self.num_common, NUM_SYMBOLS - self.num_common), case.length
        )
        question = np.array([BEGIN, *token_of[list(symbols)], SEPARATOR])
        return question_then_answer(question, np.sort(token_of[: self.num_common]))


def _most_frequent_words(tokens: np.ndarray) -> np.ndarray:
    """Return the `CommonWords.num_common` most frequent words of a text, sorted by their tokens.

    tokens: of one sequence of CommonWords, (len,).
    """
    words, counts = np.unique(tokens[tokens >= FIRST_SYMBOL], return_counts=True)
    most_frequent = words[np.argsort(-counts, kind="stable")[: CommonWords.num_common]]
    return np.sort(most_frequent)


def draw_passkey_text(
    random: np.random.Generator, filler: np.ndarray, tokens: np.ndarray, depth: float, key_len: int
) -> list[int]:
    """Draw a key of `key_len` different tokens. Return the tokens of a text: the filler with the
    key inserted at `depth`, and the key once more at the end.

    filler: tokens of a text, (len,). tokens: different tokens, at least `key_len`, of which the key
    is drawn. depth: 0 is the start of the filler, 1 its end.
    """
    key = random.permutation(tokens)[:key_len].tolist()
    return [*insert_facts(filler.tolist(), [(depth, key)]), *key]
