"""Make the puzzles of the tasks: facts to hide in a text, a question about them, and its answer."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
KEYS, HOPS, COMMON = 4, 4, 5
"""Needles in a text of several; names in a chain; words to find in a list."""
Words = Callable[[int, Callable[[str], list[int]]], list[int]]


@dataclass(frozen=True)
class Made:
    """A puzzle. facts: depth in the text of each sentence, from 0 to 1, and the sentence. words:
    function that makes a text of that many tokens; None if any text will do."""

    facts: tuple[tuple[float, str], ...]
    question: str
    answer: str
    words: Words | None = None


Puzzle = Callable[[np.random.Generator, float], Made]


def needle(rng: np.random.Generator, depth: float) -> Made:
    """Make a puzzle with one number, mentioned once."""
    (name,), (number,) = _names(rng, 1), _numbers(rng, 1)
    return Made(((depth, _told(name, number)),), _asked(name), number)


def needles(rng: np.random.Generator, depth: float) -> Made:
    """Make a puzzle with several named numbers and a question about one of them."""
    names, numbers = _names(rng, KEYS), _numbers(rng, KEYS)
    places = [depth, *rng.uniform(0, 1, KEYS - 1)]
    facts = tuple((at, _told(*pair)) for at, *pair in zip(places, names, numbers, strict=True))
    return Made(facts, _asked(names[0]), numbers[0])


def variables(rng: np.random.Generator, depth: float) -> Made:
    """Make a puzzle with two chains in which a number is passed from name to name."""
    names, (number, other) = _names(rng, 2 * HOPS), _numbers(rng, 2)
    facts = []
    for chain, value, first in ((names[:HOPS], number, depth), (names[HOPS:], other, 0.0)):
        places = np.sort(rng.uniform(first, 1, HOPS - 1)).tolist()
        values = [value, *chain]
        facts += [
            (at, f"Let {name} = {said}.")
            for at, name, said in zip([first, *places], chain, values, strict=False)
        ]
    question = f"The names that stand for {number}, in the order of the text, are"
    return Made(tuple(facts), question, " ".join(names[:HOPS]))


def common_words(rng: np.random.Generator, depth: float) -> Made:
    """Make a list in which a few words occur much more often than all others. It has no depth."""
    names = _names(rng, 40 + COMMON)
    common, rare = names[:COMMON], names[COMMON:]

    def words(count: int, encode: Callable[[str], list[int]]) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            # Five of every ten words are the common ones; any other occurs once in eight tens.
            ten = [*common, *(rare[i] for i in rng.permutation(len(rare))[:5])]
            for i in rng.permutation(len(ten)):
                tokens += encode(f" {ten[i]}")
        return tokens[:count]

    question = f"The {COMMON} words that stand most often, in the order of the alphabet, are"
    return Made((), question, " ".join(sorted(common)), words)


PUZZLES: dict[str, Puzzle] = {
    "needle": needle,
    "needles": needles,
    "variables": variables,
    "common-words": common_words,
}


def _told(name: str, number: str) -> str:
    return f"The secret number of {name} is {number}."


def _asked(name: str) -> str:
    return f"The secret number of {name} is"


def _names(rng: np.random.Generator, count: int) -> list[str]:
    """Return different three-syllable words of no language."""
    found: dict[str, None] = {}
    while len(found) < count:
        letters = [rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 3]
        found["".join(letters)] = None
    return list(found)


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Return different five-digit numbers."""
    return [str(10000 + int(i)) for i in rng.choice(90000, count, replace=False)]
