"""Draw puzzles: facts at depths of a text, a question and its answer, in symbols without a text."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

NUM_NEEDLES = 4
"""Needles in a text of several."""
CHAIN_LENGTH = 4
"""Names in a chain."""
NUM_COMMON_WORDS = 5
"""Frequent words of a list."""
NUM_RARE_WORDS = 40
"""Rare words of a list."""


class Puzzle(NamedTuple):
    """Facts of a text, a question about them, and its answer, in symbols 0, 1, 2, ...; a caller
    chooses a word or token for each symbol."""

    facts: tuple[tuple[float, tuple[int, int]], ...]
    """Pairs of symbols, each with its depth: from 0 at the start of the text to 1 at its end."""
    question: tuple[int, ...]
    """Symbols that the question names: those whose partners are asked for."""
    answer: tuple[int, ...]
    """Symbols of the right answer, in order."""


DrawPuzzle = Callable[[np.random.Generator, float], Puzzle]


def draw_needle_puzzle(
    random: np.random.Generator, depth: float, count: int = 1, beside: int = 0
) -> Puzzle:
    """Draw `count` pairs of symbols, one at `depth` and the others anywhere, and ask for the second
    symbol of the one at `depth`.

    beside: number of the others that are at `depth` too, next to it in any order, so that the first
        or the last pair of a text is not always the one asked for.

    draw_needle_puzzle(random, 0.5) -> Puzzle(facts=((0.5, (0, 1)),), question=(0,), answer=(1,))
    """
    places = [*[depth] * (1 + beside), *random.uniform(0, 1, count - 1 - beside)]
    facts = tuple((float(at), (i, count + i)) for i, at in enumerate(places))
    if beside:  # facts at one depth stay in their order
        facts = tuple(facts[i] for i in random.permutation(count).tolist())
    return Puzzle(facts, (0,), (count,))


draw_needles_puzzle = partial(draw_needle_puzzle, count=NUM_NEEDLES)


def draw_variables_puzzle(random: np.random.Generator, depth: float) -> Puzzle:
    """Draw two chains in which a number is passed from name to name, and ask for the names of one.
    Both start at `depth`, next to each other, and either is first: which one is asked for shows
    only in the question. The numbers are the last two symbols."""
    facts: list[tuple[float, tuple[int, int]]] = []
    for chain in random.permutation(2).tolist():  # facts at one depth stay in this order
        depths = [depth, *np.sort(random.uniform(depth, 1, CHAIN_LENGTH - 1)).tolist()]
        value = 2 * CHAIN_LENGTH + chain  # the number, then the name that got it last
        for name, place in zip(
            range(CHAIN_LENGTH * chain, CHAIN_LENGTH * (chain + 1)), depths, strict=True
        ):
            facts.append((place, (name, value)))
            value = name
    return Puzzle(tuple(facts), (2 * CHAIN_LENGTH,), tuple(range(CHAIN_LENGTH)))


def draw_word_stream(random: np.random.Generator, common: int, rare: int) -> Iterator[int]:
    """Yield symbols without end: half of them are 0 .. common - 1, alike often; each of the `rare`
    others is rarer."""
    while True:
        # As many rare ones are mixed in as there are common ones, others each time.
        drawn = [*range(common), *(common + random.permutation(rare)[:common])]
        yield from (int(symbol) for symbol in random.permutation(drawn))


def insert_facts(text: Sequence[int], facts: Sequence[tuple[float, Sequence[int]]]) -> list[int]:
    """Insert facts (depth, tokens) into a text of tokens: depth 0 is its start, 1 its end.

    >>> insert_facts([7, 7, 7, 7], [(0.5, [1, 2])])
    [7, 7, 1, 2, 7, 7]
    """
    with_facts: list[int] = []
    done = 0  # tokens of the text that are in the result already
    for depth, tokens in sorted(facts, key=lambda fact: fact[0]):
        stop = round(depth * len(text))
        with_facts += [*text[done:stop], *tokens]
        done = stop
    return [*with_facts, *text[done:]]


def draw_passkey_text(
    random: np.random.Generator, filler: np.ndarray, words: np.ndarray, depth: float, num_words: int
) -> list[int]:
    """Draw `num_words` of `words`, all different, and return the tokens of a text: the filler with
    these words at `depth`, and the same words once more at the end."""
    drawn = random.permutation(words)[:num_words].tolist()
    return [*insert_facts(filler.tolist(), [(depth, drawn)]), *drawn]
