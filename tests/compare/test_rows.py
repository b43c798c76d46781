"""Rows of a study: an encoding, a reading and a seed each."""

from dataclasses import replace

import pytest

from posenc.compare.results import FORMAT, Study, Timing, TrialResult
from posenc.compare.rows import rows_of
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
    assert (as_trained.far[16].far, in_a_window.far[16].far) == (4.0, 2.2)
    assert as_trained.near.bits_per_byte == in_a_window.near.bits_per_byte == 2.0
    assert (as_trained.seconds, as_trained.steps_per_second) == (10.0, 4.0)
    assert as_trained.settings == {"lr": "0.001", "encoding_lr": "20"}


def test_a_row_after_tuning_counts_the_seconds_of_the_tuning():
    tuned = replace(RESULT, readings=(Reading("tuned", SCORES),))
    assert [row.seconds for row in rows_of(study_of(tuned))] == [10.0, 12.0]


def test_an_old_result_has_rows_as_trained_without_far_values():
    old = replace(RESULT, far=(), readings=())
    (row,) = rows_of(study_of(old))
    assert (row.reading, row.far) == ("trained", {})


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
