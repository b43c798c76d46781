"""Right answers score, and a single planted wrong one does not."""

import numpy as np
import pytest

from posenc.tasks.registry import TASKS
from posenc.tasks.scoring import Score, score_answers
from posenc.tasks.task import IGNORED_TARGET

EVERY = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def batch_of(task):
    batch = task.test_batch(task.cases(task.test_lengths)[0], 16, task.train_length)
    return batch, batch.targets.copy()


@EVERY
def test_right_answers_score_one_whatever_is_said_elsewhere(task):
    batch, said = batch_of(task)
    said[said == IGNORED_TARGET] = 1
    cut = None if task.end is None else said
    found = score_answers(batch.targets, said, cut, task.end)
    assert (found.exact_match, found.token_accuracy) == (1.0, 1.0)
    expected = None if task.end is None else 1.0
    assert (found.exact_match_cut, found.token_accuracy_cut) == (expected, expected)


@EVERY
def test_one_wrong_token_costs_its_sequence(task):
    batch, said = batch_of(task)
    asked = np.argwhere(batch.targets != IGNORED_TARGET)
    row, place = asked[0]
    said[row, place] += 1
    cut = None if task.end is None else said
    found = score_answers(batch.targets, said, cut, task.end)
    assert found.exact_match == 15 / 16
    assert found.token_accuracy == pytest.approx(1 - 1 / len(asked))


def test_a_model_that_stops_too_early_scores_without_the_end_symbol_only():
    targets = np.array([[IGNORED_TARGET, 5, 6, 2], [IGNORED_TARGET, 7, 7, 2]])
    said = np.array([[9, 5, 2, 2], [9, 7, 7, 7]])  # stops early; never stops
    cut = np.array([[9, 5, 6, 6], [9, 7, 7, 7]])
    assert score_answers(targets, said, cut, end=2) == Score(0.0, pytest.approx(4 / 6), 1.0, 1.0)


@pytest.mark.parametrize(
    "targets, said, cut, end, words",
    [
        ([[1, 2]], [[1]], None, None, r"\(1, 1\) answers for \(1, 2\) targets"),
        ([[1], [IGNORED_TARGET]], [[1], [1]], None, None, "has no target"),
        ([[1]], [[1]], None, 2, "predicted_without_end"),
        ([[1]], [[1]], [[1]], None, "predicted_without_end"),
        (np.zeros((0, 3)), np.zeros((0, 3)), None, None, "has no target"),
    ],
)
def test_what_cannot_be_scored_is_refused(targets, said, cut, end, words):
    arrays = [None if each is None else np.array(each) for each in (targets, said, cut)]
    with pytest.raises(ValueError, match=words):
        score_answers(*arrays, end)
