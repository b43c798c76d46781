"""Score answers: exact match and token accuracy, with and without the end symbol."""

from dataclasses import dataclass

import numpy as np

from posenc.tasks.task import IGNORED_TARGET

LEAST_LEARNED_EXACT_MATCH = 0.9
"""The exact match at the training length below which a task is not learned, so that its scores at
other lengths say nothing; chosen, not derived."""


@dataclass(frozen=True)
class Score:
    """Hold the scores of a model's answers, fractions from 0 to 1.

    exact_match: fraction of sequences with all targets right. Teacher forcing gives the same as
        free decoding, because the first wrong token decides.
    token_accuracy: fraction of targets that are right, each predicted after the right tokens before
        it.
    exact_match_cut, token_accuracy_cut: the same without the end symbol as target or prediction,
    for models that know the answer but stop too early. None if a task has no end symbol.
    """

    exact_match: float
    token_accuracy: float
    exact_match_cut: float | None
    token_accuracy_cut: float | None


def score_answers(
    targets: np.ndarray,
    predicted: np.ndarray,
    predicted_without_end: np.ndarray | None,
    end: int | None,
) -> Score:
    """Return the score of a model's answers.

    Args:
        targets: (sequences, len), IGNORED_TARGET for tokens that are not scored.
        predicted: like targets, the model's likeliest token after each token.
        predicted_without_end: like `predicted`, the likeliest of all tokens but `end`; None exactly
            if `end` is None.
        end: the token that ends an answer; None if the task has none.

    Raises: ValueError if the shapes differ, or if a sequence has no target.

    >>> targets = np.array([[-100, 5, 6, 2]])
    >>> score_answers(targets, np.array([[0, 5, 2, 2]]), np.array([[0, 5, 6, 0]]), end=2)
    Score(exact_match=0.0, token_accuracy=0.6666666666666666, exact_match_cut=1.0, \
token_accuracy_cut=1.0)
    """
    whole = _fractions_right(targets, predicted, targets != IGNORED_TARGET)
    if (end is None) != (predicted_without_end is None):
        raise ValueError(
            "score_answers: give predicted_without_end exactly if the task has an end symbol."
        )
    if predicted_without_end is None:
        return Score(*whole, None, None)
    without_end = (targets != IGNORED_TARGET) & (targets != end)
    return Score(*whole, *_fractions_right(targets, predicted_without_end, without_end))


def _fractions_right(
    targets: np.ndarray, predicted: np.ndarray, scored: np.ndarray
) -> tuple[float, float]:
    """Return the fraction of sequences in which all scored tokens are predicted right, and that of
    right tokens among all scored ones. Raise ValueError as `score_answers`.

    All three are (sequences, len); `scored` is True for tokens that count.
    """
    if predicted.shape != targets.shape:
        raise ValueError(f"score_answers: {predicted.shape} answers for {targets.shape} targets.")
    if not scored.size or not scored.any(1).all():
        raise ValueError("score_answers: a sequence has no target.")
    right = predicted == targets
    return float((right | ~scored).all(1).mean()), float(right[scored].mean())
