"""What a task's score is worth: policies that answer without doing the task."""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from posenc.tasks.registry import TASKS
from posenc.tasks.scoring import score_answers
from posenc.tasks.task import IGNORED_TARGET, Case, Shortcut, Task

MAX_TARGETS = 2_000
"""About as many targets a policy is measured on at most; chosen: a score of a half is then within
0.03."""
MAX_SEQUENCES = 128
"""Sequences of a test that a policy is measured on at most; chosen, not derived."""
NUM_TRAINING_SEQUENCES = 128
"""Sequences of training from which a policy knows which tokens are answers."""
CHANCE, BIGRAM, BAG_OF_WORDS, ELIMINATION = "chance", "bigram", "bag of words", "elimination"

Policy = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]
"""Takes a generator, and tokens and targets of one sequence; returns a guess for each token. Of the
targets it sees those before the one that it guesses, as a model does."""


@lru_cache(maxsize=512)
def policy_scores(name: str, case: Case, train_length: int) -> dict[str, float]:
    """Return the score of each policy on a test of the task `name`, a fraction from 0 to 1 in the
    metric `Task.metric`. train_length: in the task's unit, as the length of `case`.

    chance: any token that is an answer in training. bigram: the most frequent target after the last
    token. bag of words: of the tokens so far, the answer that occurred most often. elimination: an
    answer that occurred before the first question and has not been given yet. Each shortcut of the
    task itself has a score by its own description.
    """
    task = TASKS[name]
    tokens, targets = _sequences(task, case, train_length)
    scores = {}
    for policy_name, policy in _policies(name, train_length).items():
        random = np.random.default_rng(0)
        guesses = [policy(random, t, y) for t, y in zip(tokens, targets, strict=True)]
        # A policy ends its answers where the task does, so nothing is cut.
        score = score_answers(targets, np.array(guesses), None, None)
        exact = task.metric == "exact match"
        scores[policy_name] = score.exact_match if exact else score.token_accuracy
    return scores


def _sequences(task: Task, case: Case, train_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets of a test, both (sequences, len): as many sequences as have
    MAX_TARGETS targets together, but at least 8 and at most MAX_SEQUENCES."""
    one_row = task.test_batch(case, 1, train_length)
    scored = int((one_row.targets != IGNORED_TARGET).sum())
    count = max(8, min(MAX_SEQUENCES, MAX_TARGETS // scored))
    batch = task.test_batch(case, count, train_length)
    return batch.tokens, batch.targets


@lru_cache(maxsize=32)
def _policies(name: str, train_length: int) -> dict[str, Policy]:
    """Return the policies for the task `name`, by the names that tables print."""
    task = TASKS[name]
    training_batch = task.train_batch(0, 0, NUM_TRAINING_SEQUENCES, train_length)
    scored = training_batch.targets != IGNORED_TARGET
    answers = np.unique(training_batch.targets[scored])
    follows: dict[int, Counter[int]] = {}
    for token, target in zip(
        training_batch.tokens[scored], training_batch.targets[scored], strict=True
    ):
        follows.setdefault(int(token), Counter())[int(target)] += 1
    most_frequent = {token: counts.most_common(1)[0][0] for token, counts in follows.items()}

    def guess_by_chance(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        return random.choice(answers, len(tokens))

    def guess_by_bigram(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        guesses = guess_by_chance(random, tokens, targets)
        known = [most_frequent.get(int(token)) for token in tokens]
        return np.array([g if k is None else k for g, k in zip(guesses, known, strict=True)])

    def guess_most_frequent(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        counts = dict.fromkeys(answers.tolist(), 0)
        guesses = guess_by_chance(random, tokens, targets)
        for i, token in enumerate(tokens.tolist()):
            if token in counts:
                counts[token] += 1
            if targets[i] != IGNORED_TARGET and (most := max(counts.values())):
                guesses[i] = random.choice([a for a, n in counts.items() if n == most])
        return guesses

    def guess_by_elimination(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        asked = np.flatnonzero(targets != IGNORED_TARGET)
        left = [int(token) for token in tokens[: asked[0] + 1] if token in answers]
        guesses = guess_by_chance(random, tokens, targets)
        for i in asked:
            if left:
                guesses[i] = random.choice(left)
            if targets[i] in left:  # the right answer is read before the next question
                left.remove(int(targets[i]))
        return guesses

    policies_of_task = {
        description: _policy_of_shortcut(shortcut)
        for description, shortcut in task.shortcuts().items()
    }
    return {
        CHANCE: guess_by_chance,
        BIGRAM: guess_by_bigram,
        BAG_OF_WORDS: guess_most_frequent,
        ELIMINATION: guess_by_elimination,
        **policies_of_task,
    }


def _policy_of_shortcut(shortcut: Shortcut) -> Policy:
    """Return the policy that puts a shortcut's guesses at the tokens with targets, and 0 elsewhere.

    A shortcut reads tokens alone, so it guesses for every question of the sequence. Where a test
    has removed the first targets, because training had them, only the last guesses count.
    """

    def policy(random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        guesses = np.zeros(len(tokens), np.int64)
        asked = np.flatnonzero(targets != IGNORED_TARGET)
        of_all_questions = shortcut(tokens)
        num_removed = len(of_all_questions) - len(asked)
        guesses[asked] = of_all_questions[num_removed:]
        return guesses

    return policy
