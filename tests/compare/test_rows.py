"""Rows of a study: an encoding, a reading and a seed each."""

import math
from dataclasses import replace

import pytest

from posenc.compare.results import (
    FORMAT,
    Study,
    Timing,
    TrainingPoint,
    TrialResult,
    with_labels,
)
from posenc.compare.rows import at_equal_time, rows_of
from posenc.compare.scores import FarScore, LengthScore, Reading
from posenc.compare.trial.config import TrialConfig

CONFIG = TrialConfig(
    "rope", 3, "0" * 16, 8, (8, 16), 40, 2, 8, 1, 1, 1, 1e-3, "cpu", "float32", "2", recipe=6
)
SCORES = (LengthScore(8, 2.0), LengthScore(16, 3.0))
RESULT = TrialResult(
    CONFIG,
    parameters=7,
    by_length=SCORES,
    timing=Timing(100.0, 10.0, 1.0, tuning_seconds=2.0),
    far=(FarScore(16, 4.0, 2.5, windows=(4.0,), near_windows=(2.5,)),),
    readings=(
        Reading("window", (LengthScore(8, 2.0), LengthScore(16, 2.1)), (FarScore(16, 2.2, 2.5),)),
        Reading("tuned", cannot="it has 8 positions"),
    ),
)


def study_of(result):
    return Study(FORMAT, "", "", {}, {}, None, (result.config,), (result,))


def test_a_trial_has_a_row_for_each_reading_that_is_defined():
    as_trained, in_a_window = rows_of(study_of(RESULT))
    assert (as_trained.name, in_a_window.name) == ("rope", "rope in a window")
    assert (as_trained.far_by_length[16].far, in_a_window.far_by_length[16].far) == (4.0, 2.2)
    assert as_trained.near.bits_per_byte == in_a_window.near.bits_per_byte == 2.0
    assert (as_trained.seconds, as_trained.steps_per_second) == (10.0, 4.0)
    assert as_trained.settings == {"lr": "0.001", "encoding_lr": "20"}


def test_a_row_after_tuning_counts_the_seconds_of_the_tuning():
    tuned = replace(RESULT, readings=(Reading("tuned", SCORES),))
    assert [row.seconds for row in rows_of(study_of(tuned))] == [10.0, 12.0]


def test_an_old_result_has_rows_as_trained_without_far_values():
    old = replace(RESULT, far=(), readings=())
    (row,) = rows_of(study_of(old))
    assert (row.reading, row.far_by_length) == ("trained", {})


def test_a_result_with_readings_is_read_back():
    assert TrialResult.from_json(RESULT.to_json()) == RESULT


@pytest.mark.parametrize(
    "wrong",
    [
        Reading("windowed", SCORES),
        Reading("window"),
        Reading("window", SCORES, cannot="it has none"),
        FarScore(16, None, None),
        FarScore(16, 2.0, 2.0, windows=(2.0,)),
        FarScore(16, float("nan"), 2.0),
    ],
    ids=str,
)
def test_scores_that_posenc_never_writes_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        wrong.check()


def test_a_trial_of_before_keeps_its_hash():
    # Computed by posenc before rates of encodings and readings were kept.
    assert CONFIG.hash == "ec9b849e6144"
    assert CONFIG.hash != replace(CONFIG, encoding_lr=5.0).hash
    assert CONFIG.hash != replace(CONFIG, num_windows=128).hash


def timed(encoding, seed, seconds, processor="one"):
    curve = tuple(TrainingPoint(step, 3.0, 4.0 - step / 20) for step in (5, 10, 20, 40))
    config = replace(CONFIG, encoding=encoding, seed=seed)
    timing = Timing(100.0, seconds, 1.0, processor)
    return TrialResult(config, training=curve, by_length=SCORES, timing=timing)


def study_with(*results):
    return replace(study_of(RESULT), trials=tuple(r.config for r in results), results=results)


def test_a_slower_encoding_is_read_from_its_curve_at_the_time_of_the_fastest():
    results = [timed("fast", seed, 10.0) for seed in (0, 1)]
    results += [timed("slow", 0, 39.0), timed("slow", 1, 41.0), timed("even", 0, 10.0)]
    equal = at_equal_time(study_with(*results))
    assert equal.seconds == 10.0
    assert equal.costs == {"fast": 1.0, "slow": 4.0, "even": 1.0}
    # A quarter of the 40 steps; the curve has 3.5 bits there.
    assert equal.losses["slow"] == {0: 3.5, 1: 3.5}
    assert equal.losses["fast"] == {0: 2.0, 1: 2.0}
    between = at_equal_time(study_with(timed("fast", 0, 10.0), timed("slow", 0, 10.0 * 2**1.5)))
    assert between.losses["slow"][0] == pytest.approx(3.25)  # halfway from 10 to 20 in logarithms


def test_time_is_not_equal_where_it_was_not_measured_on_one_processor():
    assert at_equal_time(study_with(timed("a", 0, 1.0), timed("b", 0, 1.0, "other"))) is None
    untimed = replace(timed("b", 0, 1.0), timing=None)
    assert at_equal_time(study_with(timed("a", 0, 1.0), untimed)) is None


def test_an_encoding_without_a_point_so_early_has_no_loss_at_equal_time():
    equal = at_equal_time(study_with(timed("fast", 0, 1.0), timed("slow", 0, 100.0)))
    assert "slow" not in equal.losses and equal.costs["slow"] == 100


def test_steps_taken_in_turns_say_what_an_encoding_costs():
    # The machine was slower in the second turn, for both alike; trials are not asked.
    turns = {"fast": (1.0, 3.0, 1.0), "slow": (2.0, 6.6, 1.8)}
    given = study_with(timed("fast", 0, 10.0), timed("slow", 0, 10.0))
    equal = at_equal_time(replace(given, step_seconds=turns))
    times = equal.ratio("slow", "fast")
    assert times == pytest.approx((2.0, 1.8, 2.2))
    assert equal.costs["slow"] == pytest.approx(2.0)
    # Steps 20 of 40 at the estimate, 18 and 22 at the bounds.
    lowest, highest = equal.loss_ranges["slow"][0]
    assert equal.losses["slow"][0] == pytest.approx(3.0)
    assert lowest < 3.0 < highest
    assert equal.is_ahead("fast", "slow", 0.02) and not equal.is_ahead("slow", "fast", 0.02)


@pytest.mark.parametrize("lacking", ["fast", "slow"])
def test_nothing_is_certain_where_one_of_two_encodings_lacks_a_seed(lacking):
    turns = {"fast": (1.0, 1.0, 1.0), "slow": (2.0, 2.0, 2.0)}
    trials = [timed(name, seed, 10.0) for name in turns for seed in (0, 1)]
    both = at_equal_time(replace(study_with(*trials), step_seconds=turns))
    assert both.is_ahead("fast", "slow", 0.02)
    fewer = [t for t in trials if (t.config.encoding, t.config.seed) != (lacking, 1)]
    one = at_equal_time(replace(study_with(*fewer), step_seconds=turns))
    assert not one.is_ahead("fast", "slow", 0.02)


def test_trials_whose_times_overlap_are_not_told_apart():
    results = [timed("a", 0, 10.0), timed("a", 1, 16.0), timed("b", 0, 12.0), timed("b", 1, 18.0)]
    times = at_equal_time(study_with(*results)).ratio("b", "a")
    assert (times.lowest, times.highest) == pytest.approx((0.75, 1.8))


def test_steps_in_turns_are_kept_under_the_encodings_labels():
    given = replace(study_with(timed("a", 0, 1.0)), step_seconds={"a": (1.0, 2.0)})
    assert Study.from_json(given.to_json()) == given
    labelled = with_labels(replace(given, labels={"a": "mine"}))
    assert labelled.step_seconds == {"mine": (1.0, 2.0)}
    with pytest.raises(ValueError, match="none of its encodings"):
        replace(given, step_seconds={"c": (1.0,)}).check()
    with pytest.raises(ValueError, match="must be positive"):
        replace(given, step_seconds={"a": (0.0,)}).check()


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ({"a": (1.0, 2.0), "b": (1.0,)}, "different numbers of steps"),
        ({"a": (1.0, 0.0), "b": (1.0, 1.0)}, "must be positive"),
        ({"a": (1.0, math.inf), "b": (1.0, 1.0)}, "must be positive"),
        ({"a": (), "b": ()}, "must be positive"),
    ],
)
def test_steps_in_turns_of_a_damaged_study_are_refused(turns, message):
    given = replace(study_with(timed("a", 0, 1.0), timed("b", 0, 1.0)), step_seconds=turns)
    with pytest.raises(ValueError, match=message):
        given.check()


def test_a_reading_without_a_score_at_the_training_length_is_refused():
    """A study of somebody else may lack it; its tables would have nothing to show there."""
    window = Reading("window", (LengthScore(512, 2.0),))
    window.check_begins_at(512)
    with pytest.raises(ValueError, match="window at the training length 128 first, got one at 512"):
        window.check_begins_at(128)
