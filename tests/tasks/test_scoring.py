"""Right answers score, a single planted wrong one does not, and policies that do not do the task
stay at their levels, so that scores say something."""

import dataclasses

import numpy as np
import pytest

from posenc.tasks import needles, scoring
from posenc.tasks.registry import TASKS, find_task
from posenc.tasks.scoring import Score, score_answers
from posenc.tasks.task import IGNORED_TARGET, Case

EVERY = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)


def batch_of(task):
    batch = task.test_batch(task.cases(task.test_lengths)[0], 16, task.train_length)
    return batch, batch.targets.copy()


@EVERY
def test_right_answers_score_one_whatever_is_said_elsewhere(task):
    batch, said = batch_of(task)
    said[said == IGNORED_TARGET] = 1
    cut = None if task.end_token is None else said
    found = score_answers(batch.targets, said, cut, task.end_token)
    assert (found.exact_match, found.token_accuracy) == (1.0, 1.0)
    expected = None if task.end_token is None else 1.0
    assert (found.exact_match_cut, found.token_accuracy_cut) == (expected, expected)


@EVERY
def test_one_wrong_token_costs_its_sequence(task):
    batch, said = batch_of(task)
    asked = np.argwhere(batch.targets != IGNORED_TARGET)
    row, place = asked[0]
    said[row, place] += 1
    cut = None if task.end_token is None else said
    found = score_answers(batch.targets, said, cut, task.end_token)
    assert found.exact_match == 15 / 16
    assert found.token_accuracy == pytest.approx(1 - 1 / len(asked))


def test_a_model_that_stops_too_early_scores_without_the_end_symbol_only():
    targets = np.array([[IGNORED_TARGET, 5, 6, 2], [IGNORED_TARGET, 7, 7, 2]])
    said = np.array([[9, 5, 2, 2], [9, 7, 7, 7]])  # stops early; never stops
    cut = np.array([[9, 5, 6, 6], [9, 7, 7, 7]])
    assert score_answers(targets, said, cut, end_token=2) == Score(
        0.0, pytest.approx(4 / 6), 1.0, 1.0
    )


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


OFFERED = [name for name, task in TASKS.items() if not task.why_retired]
LEVELS = {
    "copy": 0.02,
    "copy_512": 0.02,
    "reverse": 0.02,
    "recall": 0.42,
    "flip_flop": 0.86,
    "offset": 0.13,
    "grid": 0.13,
    "grid_direction": 0.22,
    "grid_count": 0.45,
    "needle_by_meaning": 0.38,
    "variables": 0.62,
}
"""The most that any policy may score in a test of each task; chance and three standard errors where
nothing helps, and the known share of a guess where something does."""


@pytest.mark.parametrize("name", OFFERED)
def test_no_policy_is_above_the_level_of_its_task(name):
    task = TASKS[name]
    usual, *others = task.cases(task.test_lengths)
    for case in (usual, *others[:1], *others[-2:]):
        scores = scoring.policy_scores(name, case, task.train_length)
        assert {"chance", "bigram", "bag of words", "elimination"} <= scores.keys()
        assert max(scores.values()) <= LEVELS[name], (case, scores)


def test_the_chain_that_is_first_is_right_in_half_of_the_texts_at_every_depth():
    """Until recipe 6 the other chain always began first, and a model could answer by that."""
    task = TASKS["variables"]
    for case in task.cases(task.test_lengths):
        if case.length < 1024:
            scores = scoring.policy_scores("variables", case, task.train_length)
            assert 0.36 <= scores["the chain that is first"] <= 0.64, case


def test_one_of_the_values_is_right_in_an_eighth_of_the_texts_at_every_depth():
    task = TASKS["needle_by_meaning"]
    for case in task.cases(task.test_lengths):
        scores = scoring.policy_scores("needle_by_meaning", case, task.train_length)
        assert 1 / 8 - 0.09 <= scores["one of the values"] <= 1 / 8 + 0.09, case


def test_a_bag_of_words_answers_the_retired_task_and_it_is_offered_no_more():
    scores = scoring.policy_scores("common_words", Case(64), 32)
    assert scores["counting words"] == 1.0
    with pytest.raises(ValueError, match="'common_words' is retired: counting words answers it"):
        find_task("common_words")
    with pytest.raises(ValueError, match="Unknown task 'x'") as error:
        find_task("x")
    assert "common_words" not in str(error.value)


def test_a_shortcut_guesses_at_the_last_targets_or_at_none():
    """A test may have removed the first targets of a sequence, or all of them."""
    policy = scoring._policy_of_shortcut(lambda tokens: np.array([7, 8]))
    random = np.random.default_rng(0)
    tokens = np.arange(4)
    one_target = np.array([IGNORED_TARGET, IGNORED_TARGET, IGNORED_TARGET, 8])
    assert policy(random, tokens, one_target).tolist() == [0, 0, 0, 8]
    assert policy(random, tokens, np.full(4, IGNORED_TARGET)).tolist() == [0, 0, 0, 0]


def test_policies_by_hand():
    """Each on two facts of a needle, or on four values of which one has been given."""
    tokens = np.array([0, needles.FACT, 20, 30, 5, needles.FACT, 21, 31, 1, 44])
    assert needles._last_value(tokens).tolist() == [31]
    random = np.random.default_rng(0)
    found = scoring._policies("recall", 16)
    given = np.array([0, 2, 26, 3, 27, 1, 3, 27, 2])
    targets = np.full(9, IGNORED_TARGET)
    targets[[6, 8]] = [27, 26]
    guesses = [found["elimination"](random, given, targets) for _ in range(20)]
    assert {int(g[8]) for g in guesses} == {26}  # 27 has been given
    assert {int(g[6]) for g in guesses} == {26, 27}
    more = np.array([0, 2, 27, 3, 27, 4, 26, 1, 3])
    last = np.full(9, IGNORED_TARGET)
    last[8] = 27
    assert found["bag of words"](random, more, last)[8] == 27
    reads = TASKS["flip_flop"].shortcuts()
    # write 1, read 1, write 0, write 0, read 0, read 0
    sequence = np.array([2, 1, 3, 1, 2, 0, 2, 0, 3, 0, 3])
    assert reads["the bit read last"](sequence).tolist() == [1, 1, 0]
    assert reads["most of the bits written"](sequence).tolist() == [1, 0, 0]


def test_tables_and_figures_of_a_task_show_the_levels():
    from posenc.compare.judging.summary import summarise_tasks
    from posenc.compare.page.figures import NO_MODEL, task_plots
    from posenc.compare.page.report import report_of
    from tests.compare.judging.test_standing import of_tasks

    given = of_tasks({"t5": (0.9, 0.8), "rope": (0.1, 0.3)}, tasks=("copy",))
    given = dataclasses.replace(given, tasks=summarise_tasks(given))
    rows = {row[0]: row for row in report_of(given).tables()["scores-copy"].rows}
    assert {"chance", "bigram", "bag of words", "elimination"} <= rows.keys()
    assert rows["chance"][1] == "no model"
    plot = next(plot for plot in task_plots(given) if plot.name == "task-copy")
    assert NO_MODEL in plot.chart.data["series"]
