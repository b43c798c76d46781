"""The time that a comparison announces, from measured steps."""

import dataclasses
import time

import numpy as np
import pytest

from posenc.compare.plan import splits, time_estimate
from posenc.compare.plan.time_estimate import START_SECONDS
from posenc.compare.trial import train, windows
from posenc.files.find_texts import find_text
from tests.compare.judge.test_summary import TRIAL

SLEEP = 0.02


def trials(*names: str, steps: int = 1000, seeds: int = 1):
    return [
        dataclasses.replace(TRIAL, encoding=name, steps=steps, seed=seed)
        for seed in range(seeds)
        for name in names
    ]


def test_a_trial_takes_its_steps_its_tests_and_its_start(monkeypatch, tmp_path):
    monkeypatch.setattr(windows, "read_split", lambda *args: np.zeros(5000, dtype=np.int64))
    monkeypatch.setattr(time_estimate, "_seconds_of_text_evaluation", lambda *args: 7.0)
    taken = []

    def step(model, optimizer, trial, symbols, index):
        taken.append(index)
        time.sleep(SLEEP * (20 if index < time_estimate.WARM_UP else 1))
        return 1.0

    monkeypatch.setattr(train, "take_step", step)
    got = time_estimate._seconds_of_trial(trials("rope")[0], tmp_path)
    want = START_SECONDS + 7.0 + 1000 * SLEEP
    assert want <= got < 1.25 * want
    assert taken == list(range(time_estimate.WARM_UP + time_estimate.STEPS))


def test_without_trials_nothing_is_measured(tmp_path):
    assert time_estimate.seconds_by_kind([], tmp_path, 2) == {}


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_encoding_has_its_own_pace_and_is_measured_once(workers, monkeypatch, tmp_path):
    seconds = {"rope": 100.0, "t5": 300.0, "alibi": 50.0}
    asked, shares = [], []

    def measured(share, folder):
        asked.extend(trial.encoding for trial in share)
        shares.append(share)
        return {trial.encoding: seconds[trial.encoding] for trial in share}

    monkeypatch.setattr(time_estimate, "MIN_STEPS_TO_MEASURE", 0)
    monkeypatch.setattr(time_estimate, "_measure_in_process", measured)
    got = time_estimate.expected_seconds(trials(*seconds, seeds=4), tmp_path, workers)
    assert got == 4 * 450 / workers
    assert sorted(asked) == sorted(seconds)
    assert len(shares) == workers


def test_few_steps_are_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(time_estimate, "_measure_in_process", None)
    few = trials("rope", steps=time_estimate.MIN_STEPS_TO_MEASURE - 1)
    assert time_estimate.expected_seconds(few, tmp_path, 1) is None
    assert time_estimate.expected_seconds([], tmp_path, 1) is None


@pytest.fixture
def study(tmp_path):
    """A folder with a text, and a trial that reads it."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog did not. " * 400)
    need = splits.MinimumBytes(TRIAL.train_length, max(TRIAL.test_lengths), TRIAL.batch)
    cut = splits.split_text(find_text([str(text)]), need, tmp_path)
    cut.write(tmp_path)
    return tmp_path, dataclasses.replace(TRIAL, corpus=cut.info.hash)


def test_the_processes_that_measure_say_what_they_measured(study):
    folder, trial = study
    both = [dataclasses.replace(trial, encoding=name) for name in ("rope", "alibi")]
    both.append(dataclasses.replace(trial, task="copy", train_length=4, test_lengths=(4, 8)))
    for each in both:
        (folder / each.folder).mkdir()
        time_estimate.write_trial(folder / each.folder, each)
    seconds = time_estimate._measure_in_process(both, folder)
    assert seconds.keys() == {"rope", "alibi", f"{trial.encoding} on copy"}
    assert all(START_SECONDS < each < 600 for each in seconds.values())


def test_an_encoding_that_cannot_be_built_is_the_trial_s_own_matter(study, monkeypatch):
    folder, trial = study
    monkeypatch.setattr(time_estimate, "MIN_STEPS_TO_MEASURE", 0)
    broken = dataclasses.replace(trial, encoding="no_such_encoding")
    assert time_estimate.expected_seconds([broken], folder, 1) is None
    log = (folder / broken.folder / "log.txt").read_text(encoding="utf-8")
    assert (
        log.startswith("no_such_encoding could not be timed:")
        and "no_such_encoding" in log.splitlines()[-1]
    )


def test_a_device_that_is_not_here_is_not_estimated(study, monkeypatch):
    folder, trial = study
    monkeypatch.setattr(time_estimate, "MIN_STEPS_TO_MEASURE", 0)
    elsewhere = dataclasses.replace(trial, device="meta")
    assert time_estimate.expected_seconds([elsewhere], folder, 1) is None


def test_a_measurement_that_takes_too_long_is_given_up(study, monkeypatch):
    folder, trial = study
    (folder / trial.folder).mkdir()
    time_estimate.write_trial(folder / trial.folder, trial)
    monkeypatch.setattr(time_estimate, "TIMEOUT_SECONDS", 0.01)
    assert time_estimate._measure_in_process([trial], folder) == {}


def test_a_measured_week_is_refused_and_leaves_no_folder(tmp_path, monkeypatch):
    from posenc import compare

    def never(*given):
        pytest.fail("it was trained")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("posenc.compare.run_study.expected_seconds", lambda *given: 8 * 86400)
    monkeypatch.setattr("posenc.compare.engines.run_trials.run_trials", never)
    with pytest.raises(ValueError, match=r"1 trial of 1,000 steps would take about 8 days"):
        compare.run(
            ["rope"],
            task="copy",
            train_length=16,
            test_lengths=[16, 32],
            steps=1000,
            batch=2,
            seeds=1,
            width=16,
            layers=1,
            heads=1,
            workers=1,
            device="cpu",
            precision="float32",
            out=tmp_path / "out",
        )
    assert not list(tmp_path.iterdir())
