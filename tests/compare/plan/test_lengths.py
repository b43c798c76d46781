"""Training windows of several lengths in a plan: which options make them, and which are refused."""

import dataclasses
from unittest import mock

import pytest

from posenc import compare
from posenc.compare import run_study
from posenc.compare.options import Options
from posenc.compare.plan import cost, time_estimate
from posenc.compare.plan.cost import expected_memory
from posenc.compare.plan.plan import make_plan
from posenc.compare.trial import train
from tests.compare.plan.test_equal_tuning import TRIAL
from tests.compare.plan.test_refused_before import planned

MIXED = dataclasses.replace(TRIAL, train_lengths=(32, 64, 128))


def test_the_longest_is_the_training_length_and_their_order_does_not_matter():
    (trial,) = planned(train_lengths="64,16,32")
    assert trial.train_lengths == (16, 32, 64)
    assert (trial.train_length, trial.test_lengths) == (64, (64, 128, 256, 512))
    assert trial.test_window == 64
    assert planned(train_lengths="16,32,64", train_length=64) == (trial,)
    assert trial.hash != planned(train_length=64)[0].hash
    assert planned()[0].train_lengths == ()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("32,64", "64 is the longest, and losses are judged at --train-length 128. Leave"),
        ("32,256", "256 is the longest, and losses are judged at --train-length 128. Leave"),
        ("128", "names one length only, 128. Name several, such as 32,64,128, or give --train-l"),
        ("32,32,128", "names 32 twice, and each is drawn as often as the others. Name each once"),
        ("0,128", "windows must have a length of 2 or more, got 0"),
        ("1,128", "windows must have a length of 2 or more, got 1"),
        ("-32,128", "windows must have a length of 2 or more, got -32"),
        ("48,128", r"windows of 48 do not fill a step of 4,096 exactly \(32 times 128\). Give le"),
        ("32, 64,x", "must be whole numbers separated by commas, got '32, 64,x'"),
        ("32,,128", "must be whole numbers separated by commas, got '32,,128'"),
        ("32.0,128", "must be whole numbers separated by commas"),
        ("nan,128", "must be whole numbers separated by commas"),
    ],
)
def test_lengths_that_no_training_can_have_are_refused(given, words, monkeypatch):
    monkeypatch.setattr(run_study, "dry_run", lambda *a: pytest.fail("it was measured"))
    with pytest.raises(ValueError, match=f"--train-lengths:? {words}"):
        planned(train_lengths=given, train_length=128)
    if "," in given and "longest" not in words:
        with pytest.raises(ValueError, match="--train-lengths"):
            planned(train_lengths=given)


def test_a_batch_that_all_lengths_divide_is_planned():
    with pytest.raises(ValueError, match=r"windows of 48 .* step of 4,096 exactly"):
        planned(train_lengths="48,128")
    (trial,) = planned(train_lengths="48,128", batch=3)
    assert trial.at_length(48).batch == 8


@pytest.mark.parametrize("tasks", [["copy"], ["text", "copy"]])
def test_tasks_have_lengths_of_their_own(tasks):
    with pytest.raises(ValueError, match=r"--train-lengths(:| is for text)"):
        planned(train_lengths="8,16", task=tasks)
    with pytest.raises(ValueError, match="--train-lengths: tasks have different units"):
        make_plan(Options(["rope"], suite=True, train_lengths="32,128"))


@pytest.mark.parametrize(
    ("lengths", "options", "num_shapes"),
    [
        ("2,4,8,16,32,64,128,256,512", {}, 9),
        ("8,16,32,64,128", {"micro_batch": 5}, 10),
    ],
)
def test_more_shapes_than_torch_compiles_are_refused(lengths, options, num_shapes, monkeypatch):
    monkeypatch.setattr("posenc.machine.hardware.missing_compiler", lambda device: None)
    assert planned(train_lengths=lengths, **options)
    with pytest.raises(ValueError, match=f"--train-lengths are {num_shapes} shapes of windows"):
        planned(train_lengths=lengths, compile=True, **options)
    assert planned(train_lengths=lengths.partition(",")[2], compile=True)


def test_the_command_refuses_it_in_one_line_and_writes_nothing(tmp_path, call, text):
    options = ("--steps", 2, "--text", text, "--out", tmp_path / "out")
    code, _, said = call("compare", "rope", "alibi", "--train-lengths", "48,128", *options)
    assert code == 2 and said.count("\n") == 1
    assert "windows of 48 do not fill a step" in said and not (tmp_path / "out").exists()


def test_choices_of_one_length_are_not_taken_for_several():
    assert make_plan(Options(["rope", "alibi"])).recorded is not None
    assert make_plan(Options(["rope", "alibi"], train_lengths="32,64,128")).recorded is None


def test_trials_that_choose_a_rate_have_the_same_lengths():
    plan = make_plan(Options(["rope", "alibi"], train_lengths="32,64,128", search_lr=True))
    assert {trial.train_lengths for trial in plan.rate_trials} == {(32, 64, 128)}
    tuned = make_plan(Options(["rope", "alibi"], train_lengths="32,64,128", tune=True))
    assert {trial.train_lengths for trial in tuned.rate_trials} == {(32, 64, 128)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("encoding", ["rope", "alibi", "t5"])
@pytest.mark.parametrize("changes", [{}, {"micro_batch": 4}, {"recompute": True}], ids=str)
def test_the_memory_is_that_of_the_longest_windows(encoding, changes):
    mixed = dataclasses.replace(MIXED, encoding=encoding, **changes)
    single = dataclasses.replace(mixed, train_lengths=())
    assert expected_memory([mixed]) == expected_memory([single])


def test_the_memory_is_that_of_the_length_that_takes_most(monkeypatch):
    """Which an attention of another kind may make a shorter one."""

    def most_at_64(trial, model):
        return {32: 1, 64: 8 << 30, 128: 2}[trial.train_length]

    monkeypatch.setattr(cost, "_activations_of_step", most_at_64)
    trial = dataclasses.replace(MIXED, lr=0.1234)
    cost._expected_bytes.cache_clear()
    assert expected_memory([trial]) > 8 << 30
    cost._expected_bytes.cache_clear()


def test_as_many_tokens_are_announced():
    single = dataclasses.replace(MIXED, train_lengths=())
    assert cost.most_training_tokens(MIXED) == cost.most_training_tokens(single)


def test_a_step_is_timed_at_each_length_and_takes_their_mean(monkeypatch, tmp_path):
    """Each length is drawn as often as the others."""
    now = 0.0
    seconds_at = {32: 1.0, 64: 2.0, 128: 6.0}
    taken = []

    def step(model, optimizer, config, symbols, index):
        nonlocal now
        assert config.batch * config.train_length == MIXED.batch * MIXED.train_length
        assert not config.train_lengths
        taken.append((config.train_length, index))
        now += seconds_at[config.train_length]

    monkeypatch.setattr(train, "take_step", step)
    monkeypatch.setattr("posenc.compare.trial.windows.read_split", lambda *a: b"")
    monkeypatch.setattr(time_estimate.time, "perf_counter", lambda: now)
    model = time_estimate._TimedModel(MIXED, tmp_path)
    assert model.take_step() == pytest.approx(3.0)
    assert model.take_step() == pytest.approx(3.0)
    assert taken == list(zip([32, 64, 128] * 2, range(6), strict=True))


def test_measuring_several_lengths_may_take_longer(monkeypatch, tmp_path):
    waits = []
    timer = mock.Mock(side_effect=lambda seconds, function: waits.append(seconds) or mock.Mock())
    process = mock.MagicMock()
    process.return_value.__enter__.return_value.stdout.read.return_value = ""
    monkeypatch.setattr(time_estimate.threading, "Timer", timer)
    monkeypatch.setattr(time_estimate.subprocess, "Popen", process)
    for trial in (MIXED, dataclasses.replace(MIXED, train_lengths=())):
        (tmp_path / trial.folder).mkdir()
        assert time_estimate._measure_in_process([trial], tmp_path, 0, 1) == {}
    assert waits[0] == 3 * waits[1]


def test_python_takes_a_list(monkeypatch):
    seen = []
    monkeypatch.setattr("posenc.compare.run_sizes.run", lambda options, show: seen.append(options))
    compare.run(["rope"], train_lengths=[16, 64])
    compare.run(["rope"])
    assert [options.train_lengths for options in seen] == ["16,64", None]
