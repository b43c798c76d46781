"""Score answers: exact match and token accuracy, with and without the end symbol.

To show what a score is worth, the same scores are computed for policies that answer without doing
the task.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from posenc.tasks.registry import TASKS
from posenc.tasks.task import IGNORED_TARGET, Case, Shortcut, Task

LEAST_LEARNED_EXACT_MATCH = 0.9
"""Exact match at the training length below which a task counts as not learned, so that scores at
other lengths mean nothing; chosen, not derived."""
MAX_TARGETS = 2_000
"""Number of targets in a test of a policy, about and at most; chosen: the standard error of a score
of a half is then about 0.01."""
MAX_SEQUENCES = 128
"""Maximum number of sequences in a test of a policy; chosen, not derived."""
NUM_TRAINING_SEQUENCES = 128
"""Number of training sequences from which a policy learns which tokens are answers."""
CHANCE, BIGRAM, BAG_OF_WORDS, ELIMINATION = "chance", "bigram", "bag of words", "elimination"


@dataclass(frozen=True)
class Score:
    """Hold the scores of a model's answers, fractions from 0 to 1.

    exact_match: fraction of sequences with all targets right. It is the same with teacher forcing
    as with free decoding, because the first wrong token decides.
    token_accuracy: fraction of targets that are right, each predicted after the right tokens before
    it.
    exact_match_cut, token_accuracy_cut: the same, but without the end symbol among targets and
    predictions, for models that know the answer but stop too early. None if a task has no end
    symbol.
    """

    exact_match: float
    token_accuracy: float
    exact_match_cut: float | None
    token_accuracy_cut: float | None


def score_answers(
    targets: np.ndarray,
    predicted: np.ndarray,
    predicted_without_end: np.ndarray | None,
    end_token: int | None,
) -> Score:
    """Return the score of a model's answers.

    Args:
        targets: (sequences, len), IGNORED_TARGET for tokens that are not scored.
        predicted: like targets, the model's likeliest token after each token.
        predicted_without_end: like `predicted`, the likeliest of all tokens but `end_token`; None
        exactly
            if `end_token` is None.
        end_token: the token that ends an answer; None if the task has none.

    Raises: ValueError if the shapes differ, or if a sequence has no target.

    >>> targets = np.array([[-100, 5, 6, 2]])
    >>> score_answers(targets, np.array([[0, 5, 2, 2]]), np.array([[0, 5, 6, 0]]), end_token=2)
    Score(exact_match=0.0, token_accuracy=0.6666666666666666, exact_match_cut=1.0, \
token_accuracy_cut=1.0)
    """
    fractions_with_end = _fractions_right(targets, predicted, targets != IGNORED_TARGET)
    if (end_token is None) != (predicted_without_end is None):
        raise ValueError(
            "score_answers: give predicted_without_end exactly if the task has an end symbol."
        )
    if predicted_without_end is None:
        return Score(*fractions_with_end, None, None)
    scored_without_end = (targets != IGNORED_TARGET) & (targets != end_token)
    return Score(
        *fractions_with_end, *_fractions_right(targets, predicted_without_end, scored_without_end)
    )


def _fractions_right(
    targets: np.ndarray, predicted: np.ndarray, is_scored: np.ndarray
) -> tuple[float, float]:
    """Return the fraction of sequences in which all scored tokens are predicted right, and that of
    right tokens among all scored ones. Raise ValueError as `score_answers`.

    All three are (sequences, len); `is_scored` is True for tokens that count.
    """
    if predicted.shape != targets.shape:
        raise ValueError(f"score_answers: {predicted.shape} answers for {targets.shape} targets.")
    if not is_scored.size or not is_scored.any(1).all():
        raise ValueError("score_answers: a sequence has no target.")
    is_right = predicted == targets
    return float((is_right | ~is_scored).all(1).mean()), float(is_right[is_scored].mean())


Policy = Callable[[np.random.Generator, np.ndarray, np.ndarray], np.ndarray]
"""Answers one sequence without doing the task: takes a random generator, tokens and targets, (len,)
each; returns a guess for each token. Like a model, it reads only those targets that come before the
one it guesses."""


@lru_cache(maxsize=512)
def policy_scores(name: str, case: Case, train_length: int) -> dict[str, float]:
    """Return the score of each policy on a test of the task `name`, by the policy's name: a
    fraction from 0 to 1 in the metric `Task.metric`.

    case: the test. train_length: in the task's unit, as the length of `case`.

    The policies are: "chance": any token that is an answer in training. "bigram": the most frequent
    target after the last token. "bag of words": of the tokens so far, the answer that occurred most
    often. "elimination": an answer that occurred before the first question and has not been given
    yet. Each shortcut of the task has the name by which `Task.shortcuts` describes it.
    """
    task = TASKS[name]
    tokens, targets = _sequences(task, case, train_length)
    scores = {}
    for policy_name, policy in _policies(name, train_length).items():
        random = np.random.default_rng(0)
        guesses = [policy(random, t, y) for t, y in zip(tokens, targets, strict=True)]
        # A policy ends its answers where the task does, so nothing is cut.
        score = score_answers(targets, np.array(guesses), None, None)
        is_exact_match = task.metric == "exact match"
        scores[policy_name] = score.exact_match if is_exact_match else score.token_accuracy
    return scores


def _sequences(task: Task, case: Case, train_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and targets of a test, both (sequences, len). There are as many sequences as
    have about MAX_TARGETS targets together, but at least 8 and at most MAX_SEQUENCES."""
    one_row = task.test_batch(case, 1, train_length)
    num_scored = int((one_row.targets != IGNORED_TARGET).sum())
    num_sequences = max(8, min(MAX_SEQUENCES, MAX_TARGETS // num_scored))
    batch = task.test_batch(case, num_sequences, train_length)
    return batch.tokens, batch.targets


@lru_cache(maxsize=32)
def _policies(name: str, train_length: int) -> dict[str, Policy]:
    """Return the policies for the task `name`, by their names in tables."""
    task = TASKS[name]
    training_batch = task.train_batch(0, 0, NUM_TRAINING_SEQUENCES, train_length)
    is_scored = training_batch.targets != IGNORED_TARGET
    answers = np.unique(training_batch.targets[is_scored])
    targets_after: dict[int, Counter[int]] = {}
    for token, target in zip(
        training_batch.tokens[is_scored], training_batch.targets[is_scored], strict=True
    ):
        targets_after.setdefault(int(token), Counter())[int(target)] += 1
    most_frequent = {token: counts.most_common(1)[0][0] for token, counts in targets_after.items()}

    def guess_by_chance(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        return random.choice(answers, len(tokens))

    def guess_by_bigram(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        guesses = guess_by_chance(random, tokens, targets)
        known_guesses = [most_frequent.get(int(token)) for token in tokens]
        return np.array(
            [
                guess if known_guess is None else known_guess
                for guess, known_guess in zip(guesses, known_guesses, strict=True)
            ]
        )

    def guess_most_frequent(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        counts = dict.fromkeys(answers.tolist(), 0)
        guesses = guess_by_chance(random, tokens, targets)
        for i, token in enumerate(tokens.tolist()):
            if token in counts:
                counts[token] += 1
            if targets[i] != IGNORED_TARGET and (largest_count := max(counts.values())):
                guesses[i] = random.choice(
                    [answer for answer, count in counts.items() if count == largest_count]
                )
        return guesses

    def guess_by_elimination(
        random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        indices_asked = np.flatnonzero(targets != IGNORED_TARGET)
        answers_left = [int(token) for token in tokens[: indices_asked[0] + 1] if token in answers]
        guesses = guess_by_chance(random, tokens, targets)
        for i in indices_asked:
            if answers_left:
                guesses[i] = random.choice(answers_left)
            if targets[i] in answers_left:  # the right answer is read before the next question
                answers_left.remove(int(targets[i]))
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
    """Return the policy whose guesses are those of a shortcut at tokens with targets, and 0
    elsewhere.

    A shortcut guesses for every question of a sequence. Where a test has removed the first targets,
    because training had them, only its last guesses are used.
    """

    def policy(random: np.random.Generator, tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
        guesses = np.zeros(len(tokens), np.int64)
        indices_asked = np.flatnonzero(targets != IGNORED_TARGET)
        all_guesses = shortcut(tokens)
        num_removed = len(all_guesses) - len(indices_asked)
        guesses[indices_asked] = all_guesses[num_removed:]
        return guesses

    return policy
