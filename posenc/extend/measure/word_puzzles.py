"""Write puzzles in words: names, numbers and sentences for the symbols of `posenc.tasks`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from posenc.tasks.needles import (
    draw_needle_puzzle,
    draw_needles_puzzle,
    draw_variables_puzzle,
    draw_word_stream,
)

NUM_COMMON_WORDS = 5
"""Frequent words of a list."""
NUM_RARE_WORDS = 40
"""Rare words of a list."""
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
CITIES = {
    "Paris": "France",
    "Berlin": "Germany",
    "Rome": "Italy",
    "Madrid": "Spain",
    "Tokyo": "Japan",
    "Moscow": "Russia",
    "Cairo": "Egypt",
    "Athens": "Greece",
    "Vienna": "Austria",
    "Lisbon": "Portugal",
    "Warsaw": "Poland",
    "Dublin": "Ireland",
}
"""Cities and their countries, which have no word in common."""
SECRET_SENTENCE = "The secret number of {} is"
PUZZLE_SENTENCES = {
    "needle": (draw_needle_puzzle, SECRET_SENTENCE + " {}.", SECRET_SENTENCE),
    "needles": (draw_needles_puzzle, SECRET_SENTENCE + " {}.", SECRET_SENTENCE),
    "variables": (
        draw_variables_puzzle,
        "Let {} = {}.",
        "The names that stand for {}, in the order of the text, are",
    ),
    "needle-by-meaning": (draw_needles_puzzle, "In {} lives {}.", "In a city of {} lives"),
}
"""By task: the function that draws its puzzle, the sentence of a fact, and the sentence that asks
for the answer, which follows it."""
COMMON_WORDS = "common-words"
PUZZLES = (*PUZZLE_SENTENCES, COMMON_WORDS)


class PuzzleInWords(NamedTuple):
    """Sentences with their depths in the text, a question and its answer, and the words of the
    text; None if any text will do."""

    facts: tuple[tuple[float, str], ...]
    question: str
    answer: str
    words: Iterator[str] | None = None


def write_puzzle(name: str, rng: np.random.Generator, depth: float) -> PuzzleInWords:
    """Return a puzzle of the task `name` in words. depth: where its fact is, from 0 at the start of
    the text to 1 at its end; the task common-words ignores it."""
    if name == COMMON_WORDS:
        return _common_words_puzzle(rng)
    draw, fact, question = PUZZLE_SENTENCES[name]
    puzzle = draw(rng, depth)
    keys = dict.fromkeys(key for _, (key, _) in puzzle.facts)
    values = dict.fromkeys(value for _, (_, value) in puzzle.facts)
    only_values = [value for value in values if value not in keys]
    words: dict[int, str]  # of each symbol
    if name == "needle-by-meaning":
        words = dict(zip(keys, rng.permutation(list(CITIES)), strict=False))
        words |= zip(only_values, _random_names(rng, len(only_values)), strict=True)
        names_in_question = [CITIES[words[city]] for city in puzzle.question]
    else:
        words = dict(zip(keys, _random_names(rng, len(keys)), strict=True))
        # Numbers of five digits, 10000 to 99999.
        draws = rng.choice(90000, len(only_values), replace=False)
        words |= zip(only_values, (str(10000 + int(i)) for i in draws), strict=True)
        names_in_question = [words[symbol] for symbol in puzzle.question]
    facts = tuple((at, fact.format(words[key], words[value])) for at, (key, value) in puzzle.facts)
    answer = " ".join(words[symbol] for symbol in puzzle.answer)
    return PuzzleInWords(facts, question.format(*names_in_question), answer)


def _common_words_puzzle(rng: np.random.Generator) -> PuzzleInWords:
    """Return a puzzle whose text is a stream of words, a few of which come often. The answer are
    these, in the order of the alphabet."""
    words = _random_names(rng, NUM_COMMON_WORDS + NUM_RARE_WORDS)
    question = (
        f"The {NUM_COMMON_WORDS} words that stand most often, in the order of the alphabet, are"
    )
    text = (words[i] for i in draw_word_stream(rng, NUM_COMMON_WORDS, NUM_RARE_WORDS))
    return PuzzleInWords((), question, " ".join(sorted(words[:NUM_COMMON_WORDS])), text)


def _random_names(rng: np.random.Generator, count: int) -> list[str]:
    """Return `count` different three-syllable words of no language, such as "bafiko"."""
    names: dict[str, None] = {}  # a set in the order of drawing
    while len(names) < count:
        letters = [rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 3]
        names["".join(letters)] = None
    return list(names)
