"""The time that a comparison announces, from measured steps."""

import dataclasses
import time
from typing import Any

import pytest

from posenc.compare.plan import splits, time_estimate
from posenc.compare.plan.time_estimate import START_SECONDS
from posenc.compare.trial import train
from posenc.files.find_texts import find_text
from tests.compare.judging.test_summary import TRIAL

SLEEP = 0.02


def trials(*names: str, steps: int = 1000, seeds: int = 1):
    return [
        dataclasses.replace(TRIAL, encoding=name, steps=steps, seed=seed)
        for seed in range(seeds)
        for name in names
    ]


def answer(seconds, timed_tests=True) -> Any:
    """What a process says of trials of two steps, by encoding."""
    return {
        name: {
            "step_seconds": [each, 3 * each],
            "num_steps": 2.0 if timed_tests else None,
            "test_seconds": 7.0 if timed_tests else 0.0,
        }
        for name, each in seconds.items()
    }


def test_a_trial_takes_its_steps_its_tests_and_its_start():
    kinds = time_estimate._join_measurements([answer({"rope": 10.0})])
    assert kinds["rope"].seconds == START_SECONDS + 7.0 + 2 * 20.0


def test_steps_of_all_processes_are_kept_in_the_order_of_their_turns():
    first = answer({"rope": 10.0, "t5": 1.0})
    first["t5"] = answer({"t5": 1.0}, timed_tests=False)["t5"]
    second = answer({"rope": 20.0, "t5": 2.0})
    second["rope"] = answer({"rope": 20.0}, timed_tests=False)["rope"]
    kinds = time_estimate._join_measurements([first, second])
    assert kinds["rope"].step_seconds == (10.0, 30.0, 20.0, 60.0)
    assert kinds["t5"].step_seconds == (1.0, 3.0, 2.0, 6.0)
    # One that failed in one of the processes is left out: its turns would not fit the others'.
    assert time_estimate._join_measurements([first, {"rope": second["rope"]}]).keys() == {"rope"}


def test_models_take_steps_in_turns(monkeypatch, study):
    folder, trial = study
    taken = []

    def step(model, optimizer, config, symbols, index):
        taken.append((config.encoding, index))
        time.sleep(SLEEP)

    monkeypatch.setattr(train, "take_step", step)
    both = [dataclasses.replace(trial, encoding=name) for name in ("rope", "alibi")]
    measured = time_estimate._measure(both, [False, False], folder, turns=2)
    assert taken[2:] == [("rope", 1), ("alibi", 1), ("rope", 2), ("alibi", 2)]
    assert all(seconds >= SLEEP for each in measured.values() for seconds in each["step_seconds"])
    taken.clear()
    monkeypatch.setattr(time_estimate, "MAX_BYTES_IN_TURNS", 1)  # no two at a time
    assert time_estimate._measure(both, [False, False], folder, turns=2).keys() == {"rope", "alibi"}
    assert [name for name, _ in taken] == ["rope"] * 3 + ["alibi"] * 3


def test_without_trials_nothing_is_measured(tmp_path):
    assert time_estimate.measure_kinds([], tmp_path, 2) == {}
    assert time_estimate.expected_seconds([], {}, 1) is None


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_each_encoding_has_its_own_pace_and_its_tests_are_timed_once(
    workers, monkeypatch, tmp_path
):
    seconds = {"rope": 10.0, "t5": 30.0, "alibi": 5.0}

    def measured(kinds, folder, index, count):
        assert [trial.encoding for trial in kinds] == list(seconds)
        timed = {name: i % count == index for i, name in enumerate(seconds)}
        return {name: answer({name: seconds[name]}, timed[name])[name] for name in seconds}

    monkeypatch.setattr(time_estimate, "_measure_in_process", measured)
    planned = trials(*seconds, seeds=4)
    kinds = time_estimate.measure_kinds(planned, tmp_path, workers)
    assert {len(kind.step_seconds) for kind in kinds.values()} == {2 * workers}
    each = [START_SECONDS + 7.0 + 4 * of_step for of_step in seconds.values()]
    got = time_estimate.expected_seconds(planned, kinds, workers)
    assert got == round(4 * sum(each) / workers)


@pytest.fixture
def study(tmp_path):
    """A folder with a text, and a trial that reads it."""
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and the dog did not. " * 400)
    need = splits.MinimumSizes(TRIAL.train_length, max(TRIAL.test_lengths), TRIAL.batch)
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
    first, second = (time_estimate._measure_in_process(both, folder, i, 2) for i in (0, 1))
    assert first.keys() == second.keys() == {"rope", "alibi", f"{trial.encoding} on copy"}
    assert [each["num_steps"] for each in first.values()] == [trial.steps, None, trial.steps]
    assert [each["num_steps"] for each in second.values()] == [None, trial.steps, None]
    for seconds in (*first.values(), *second.values()):
        assert len(seconds["step_seconds"]) == time_estimate.TIMED_STEPS / 2
        assert all(0 < each < 60 for each in seconds["step_seconds"])


def test_an_encoding_that_cannot_be_built_is_the_trial_s_own_matter(study):
    folder, trial = study
    broken = dataclasses.replace(trial, encoding="no_such_encoding")
    assert time_estimate.measure_kinds([broken], folder, 1) == {}
    log = (folder / broken.folder / "log.txt").read_text(encoding="utf-8")
    assert (
        log.startswith("no_such_encoding could not be timed:")
        and "no_such_encoding" in log.splitlines()[-1]
    )


def test_a_device_that_is_not_here_is_not_estimated(study):
    folder, trial = study
    elsewhere = dataclasses.replace(trial, device="meta")
    assert time_estimate.measure_kinds([elsewhere], folder, 1) == {}


def test_a_measurement_that_takes_too_long_is_given_up(study, monkeypatch):
    folder, trial = study
    (folder / trial.folder).mkdir()
    time_estimate.write_trial(folder / trial.folder, trial)
    monkeypatch.setattr(time_estimate, "TIMEOUT_SECONDS", 0.01)
    assert time_estimate._measure_in_process([trial], folder, 0, 1) == {}


def test_a_measured_week_is_refused_and_leaves_no_folder(tmp_path, monkeypatch):
    from posenc import compare

    def never(*given):
        pytest.fail("it was trained")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "posenc.compare.plan.time_estimate.expected_seconds", lambda *given: 8 * 86400
    )
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
