"""Write puzzles in words: names, numbers and sentences for the symbols of `posenc.tasks`."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from posenc.tasks.puzzles import COMMON, RARE, frequent, needle, needles, variables

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
SECRET = "The secret number of {} is"
SENTENCES = {
    "needle": (needle, SECRET + " {}.", SECRET),
    "needles": (needles, SECRET + " {}.", SECRET),
    "variables": (
        variables,
        "Let {} = {}.",
        "The names that stand for {}, in the order of the text, are",
    ),
    "needle-by-meaning": (needles, "In {} lives {}.", "In a city of {} lives"),
}
"""Per task: the puzzle, the sentence of a fact and the beginning of the answer's."""
COMMON_WORDS = "common-words"
PUZZLES = (*SENTENCES, COMMON_WORDS)


class Told(NamedTuple):
    """Sentences with their depths in the text, a question and its answer, and the words of the
    text; None if any text will do."""

    facts: tuple[tuple[float, str], ...]
    question: str
    answer: str
    words: Iterator[str] | None = None


def told(name: str, rng: np.random.Generator, depth: float) -> Told:
    """Write a puzzle. A list of words has no depth."""
    if name == COMMON_WORDS:
        words = _names(rng, COMMON + RARE)
        question = f"The {COMMON} words that stand most often, in the order of the alphabet, are"
        text = (words[i] for i in frequent(rng, COMMON, RARE))
        return Told((), question, " ".join(sorted(words[:COMMON])), text)
    draw, fact, question = SENTENCES[name]
    puzzle = draw(rng, depth)
    keys = dict.fromkeys(key for _, (key, _) in puzzle.facts)
    others = [s for s in dict.fromkeys(v for _, (_, v) in puzzle.facts) if s not in keys]
    if name == "needle-by-meaning":
        said = dict(zip(keys, rng.permutation(list(CITIES)), strict=False))
        asked = [CITIES[said[key]] for key in puzzle.asked]
        said |= zip(others, _names(rng, len(others)), strict=True)
    else:
        said = dict(zip(keys, _names(rng, len(keys)), strict=True))
        numbers = (str(10000 + int(i)) for i in rng.choice(90000, len(others), replace=False))
        said |= zip(others, numbers, strict=True)
        asked = [said[symbol] for symbol in puzzle.asked]
    facts = tuple((at, fact.format(said[key], said[value])) for at, (key, value) in puzzle.facts)
    return Told(facts, question.format(*asked), " ".join(said[s] for s in puzzle.answer))


def _names(rng: np.random.Generator, count: int) -> list[str]:
    """Return different three-syllable words of no language."""
    found: dict[str, None] = {}
    while len(found) < count:
        letters = [rng.choice(list(kind)) for kind in (CONSONANTS, VOWELS) * 3]
        found["".join(letters)] = None
    return list(found)
