"""Which readings a plan has, which encodings by default, and what is refused before training."""

import pytest

from posenc.compare.defaults import DEFAULT_ENCODINGS
from posenc.compare.options import Options
from posenc.compare.plan.learning_rate_search import rate_trials
from posenc.compare.plan.plan import check_plan, make_plan


def trial_of(**options):
    return make_plan(Options(["rope", "alibi"], **options)).task_trials[0]


def test_by_default_a_text_is_read_in_a_window_and_after_a_tuning():
    trial = trial_of()
    assert (trial.train_length, max(trial.test_lengths)) == (128, 1024)
    assert (trial.num_windows, trial.test_window, trial.tune_steps) == (128, 128, 100)
    assert trial_of(steps=10_000).tune_steps == 500
    assert trial_of(test_window=64, tune_steps=7).test_window == 64
    assert trial_of(test_window=64, tune_steps=7).tune_steps == 7
    assert trial_of(test_window=0, tune_steps=0).test_window == 0
    assert trial_of(num_windows=512).num_windows == 512
    assert trial_of().encoding_lr == 20 and trial_of(encoding_lr=3.0).encoding_lr == 3


@pytest.mark.parametrize(
    "options", [{"test_lengths": "128"}, {"task": ["copy"]}, {"objective": "masked"}], ids=str
)
def test_what_is_no_longer_or_not_causal_is_read_as_trained_only(options):
    if options.get("objective") == "masked":
        (trial,) = make_plan(Options(["t5", "rope"], **options)).task_trials
    else:
        trial = trial_of(**options)
    assert (trial.test_window, trial.tune_steps) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test_window": 1024}, "hides nothing in tests of up to 1024"),
        ({"test_window": 64, "objective": "masked"}, "reads whole windows from both sides"),
        ({"tune_steps": 5, "test_lengths": "128"}, "would tune at the training length itself"),
        ({"tune_steps": 5, "objective": "seq2seq"}, "--objective seq2seq trains none"),
        ({"encoding_lr": 0.0}, "--encoding-lr must be a positive number"),
        ({"encoding_lr": float("nan")}, "--encoding-lr must be a positive number"),
        ({"num_windows": 1}, "--num-windows must be a whole number of at least 2"),
    ],
    ids=str,
)
def test_a_reading_that_makes_no_sense_is_refused_in_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(Options(["rope", "t5"], **options))


def test_a_learning_rate_is_chosen_without_readings():
    plan = make_plan(Options(["rope", "alibi"], search_lr=True))
    assert {(t.test_window, t.tune_steps) for t in rate_trials(plan.trials)} == {(0, 0)}


def test_a_hybrid_by_layer_is_a_default_where_the_layers_allow():
    assert "rnope_swa" in DEFAULT_ENCODINGS
    names = {n: [e.text for e in make_plan(Options(layers=n)).compared] for n in (3, 4)}
    assert names[4] == list(DEFAULT_ENCODINGS)
    assert names[3] == [name for name in DEFAULT_ENCODINGS if name != "rnope_swa"]


@pytest.mark.parametrize(
    ("encodings", "message"),
    [
        (["rnope", "rope"], "Here --layers 4 would do"),
        (["rope", "rope/nope every 4"], "Here --layers 4 would do"),
        (["rope", "mine=rope:rope_theta=10000"], "are the same encoding in this model of 3 layers"),
    ],
    ids=str,
)
def test_a_hybrid_beyond_the_layers_and_twins_are_refused_before_training(encodings, message):
    plan = make_plan(Options(encodings, layers=3))
    with pytest.raises(ValueError, match=message):
        check_plan(plan, 1, 1)
