"""Draw puzzles: facts at depths of a text, a question and its answer, in symbols without a text."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

KEYS = 4
"""Needles in a text of several."""
HOPS = 4
"""Names in a chain."""
COMMON = 5
"""Frequent words of a list."""
RARE = 40
"""Rare words of a list."""


class Puzzle(NamedTuple):
    """Facts at depths from 0, the start of the text, to 1; the symbols asked for, and the answer.
    Symbols are 0, 1, 2, ...; a caller chooses a word or token for each."""

    facts: tuple[tuple[float, tuple[int, int]], ...]
    asked: tuple[int, ...]
    answer: tuple[int, ...]


DrawPuzzle = Callable[[np.random.Generator, float], Puzzle]


def draw_needle_puzzle(random: np.random.Generator, depth: float, count: int = 1) -> Puzzle:
    """Draw `count` pairs of symbols, one at `depth` and the others anywhere, and ask for the second
    symbol of the one at `depth`."""
    places = [depth, *random.uniform(0, 1, count - 1)]
    facts = tuple((float(at), (i, count + i)) for i, at in enumerate(places))
    return Puzzle(facts, (0,), (count,))


draw_needles_puzzle = partial(draw_needle_puzzle, count=KEYS)


def draw_variables_puzzle(random: np.random.Generator, depth: float) -> Puzzle:
    """Draw two chains in which a number is passed from name to name, and ask for the names of the
    chain that starts at `depth`. The numbers are the last two symbols."""
    facts: list[tuple[float, tuple[int, int]]] = []
    for chain, first in ((0, depth), (1, 0.0)):
        depths = [first, *np.sort(random.uniform(first, 1, HOPS - 1)).tolist()]
        value = 2 * HOPS + chain  # the number, then the name that got it last
        for name, place in zip(range(HOPS * chain, HOPS * (chain + 1)), depths, strict=True):
            facts.append((place, (name, value)))
            value = name
    return Puzzle(tuple(facts), (2 * HOPS,), tuple(range(HOPS)))


def draw_word_stream(random: np.random.Generator, common: int, rare: int) -> Iterator[int]:
    """Yield symbols without end: half of them are 0 .. common - 1, alike often; each of the `rare`
    others is rarer."""
    while True:
        # As many rare ones are mixed in as there are common ones, others each time.
        drawn = [*range(common), *(common + random.permutation(rare)[:common])]
        yield from (int(symbol) for symbol in random.permutation(drawn))


def insert_facts(text: Sequence[int], facts: Sequence[tuple[float, Sequence[int]]]) -> list[int]:
    """Insert facts (depth, tokens) into a text of tokens."""
    with_facts: list[int] = []
    done = 0  # tokens of the text that are in the result already
    for depth, tokens in sorted(facts, key=lambda fact: fact[0]):
        stop = round(depth * len(text))
        with_facts += [*text[done:stop], *tokens]
        done = stop
    return [*with_facts, *text[done:]]


def draw_passkey_text(
    random: np.random.Generator, filler: np.ndarray, words: np.ndarray, depth: float, secret: int
) -> list[int]:
    """Draw `secret` different words, and return them at a depth of the filler and at its end."""
    drawn = random.permutation(words)[:secret].tolist()
    return [*insert_facts(filler.tolist(), [(depth, drawn)]), *drawn]
