"""Losses of other trainers get the verdicts of compare."""

from dataclasses import replace
from pathlib import Path

import pytest

import posenc
from posenc.compare.judging.answer import answer_and_choices, conclude
from posenc.compare.judging.judgement import verdicts_of_pairs
from posenc.compare.judging.near_far import standings
from posenc.compare.results import Study, with_labels
from tests.compare.reports.loss_tables import records_of, write_csv
from tests.experiment import experiment

published_trials = experiment("published_trials")
RESULTS = Path(__file__).parents[3] / "results"


def verdicts(study: Study):
    """Everything that the seeds of a study decide: in each place the order, the means, each pair's
    verdict, difference and half of its interval."""
    found = []
    for standing in standings(study):
        pairs = [
            (
                *pair,
                round(standing.gap(*pair[:2]).value, 9),
                round(standing.gap(*pair[:2]).half_width, 9),
            )
            for pair in verdicts_of_pairs(standing)
        ]
        named = {name: standing.verdict(name) for name in standing.order}
        means = [round(standing.mean(name), 9) for name in standing.order]
        found.append((standing.order, named, means, standing.contenders, pairs))
    return found


@pytest.mark.parametrize("name", ["code", "novel"])
def test_the_rows_of_the_board_give_the_boards_verdicts(name, tmp_path):
    board = published_trials.published_studies()[name]
    path = write_csv(tmp_path / "losses.csv", records_of(board))
    judged = posenc.compare.judge(path)
    assert verdicts(judged) == verdicts(board)
    assert answer_and_choices(judged).row_names == answer_and_choices(board).row_names


def without_windows(study: Study) -> Study:
    """The study without what a table cannot have: losses of single windows, what searches tried,
    steps in turns."""
    results = []
    for result in study.results:
        by_length = tuple(replace(score, windows=()) for score in result.by_length)
        training = tuple(replace(point, train=None) for point in result.training)
        results.append(replace(result, by_length=by_length, training=training))
    return conclude(replace(study, results=tuple(results), rates=(), step_seconds={}))


def test_a_study_of_compare_is_judged_alike(tmp_path):
    study = without_windows(with_labels(Study.read(RESULTS / "compare/study.json")))
    judged = posenc.compare.judge(write_csv(tmp_path / "losses.csv", records_of(study)))
    assert verdicts(judged) == verdicts(study)
    assert judged.recommendation == study.recommendation
    assert answer_and_choices(judged) == answer_and_choices(study)
