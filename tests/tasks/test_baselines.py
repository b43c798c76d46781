"""Policies that answer without doing a task stay at their levels, so that scores say something."""

import dataclasses

import numpy as np
import pytest

from posenc.tasks import baselines, needles
from posenc.tasks.registry import TASKS, find_task
from posenc.tasks.task import IGNORED_TARGET, Case

OFFERED = [name for name, task in TASKS.items() if not task.retired]
LEVELS = {
    "copy": 0.02,
    "copy_512": 0.02,
    "reverse": 0.02,
    "recall": 0.42,
    "flip_flop": 0.86,
    "offset": 0.13,
    "grid": 0.13,
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
        scores = baselines.policy_scores(name, case, task.train_length)
        assert {"chance", "bigram", "bag of words", "elimination"} <= scores.keys()
        assert max(scores.values()) <= LEVELS[name], (case, scores)


def test_the_chain_that_is_first_is_right_in_half_of_the_texts_at_every_depth():
    """Until recipe 6 the other chain always began first, and a model could answer by that."""
    task = TASKS["variables"]
    for case in task.cases(task.test_lengths):
        if case.length < 1024:
            scores = baselines.policy_scores("variables", case, task.train_length)
            assert 0.36 <= scores["the chain that is first"] <= 0.64, case


def test_a_bag_of_words_answers_the_retired_task_and_it_is_offered_no_more():
    scores = baselines.policy_scores("common_words", Case(64), 32)
    assert scores["counting words"] == 1.0
    with pytest.raises(ValueError, match="'common_words' is retired: counting words answers it"):
        find_task("common_words")
    with pytest.raises(ValueError, match="Unknown task 'x'") as error:
        find_task("x")
    assert "common_words" not in str(error.value)


def test_a_shortcut_guesses_at_the_last_targets_or_at_none():
    """A test may have removed the first targets of a sequence, or all of them."""
    policy = baselines._policy_of_shortcut(lambda tokens: np.array([7, 8]))
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
    found = baselines._policies("recall", 16)
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
    from posenc.compare.judge.summary import summarise_tasks
    from posenc.compare.page.figures import NO_MODEL, task_plots
    from posenc.compare.page.report import report_of
    from tests.compare.judge.test_standing import of_tasks

    given = of_tasks({"t5": (0.9, 0.8), "rope": (0.1, 0.3)}, tasks=("copy",))
    given = dataclasses.replace(given, tasks=summarise_tasks(given))
    rows = {row[0]: row for row in report_of(given).tables()["scores-copy"].rows}
    assert {"chance", "bigram", "bag of words", "elimination"} <= rows.keys()
    assert rows["chance"][1] == "no model"
    plot = next(plot for plot in task_plots(given) if plot.name == "task-copy")
    assert NO_MODEL in plot.chart.data["series"]
